"""Runs llama.cpp's converter in a process of its own; started by file name, never imported.

Its argument is JSON: ``{"converter": folder, "pre_tokenizer": name or null, "jobs": [[argument, ..], ..]}``.
Several jobs share one process because importing torch and transformers takes longer than a small conversion.
"""

import ctypes
import json
import os
import runpy
import sys


def main() -> None:
    if sys.platform == "linux":
        # A killed export must not leave a process behind that goes on writing: PR_SET_PDEATHSIG, SIGKILL.
        ctypes.CDLL(None).prctl(1, 9)
    spec = json.loads(sys.argv[1])
    folder = spec["converter"]
    # Python put this file's folder first, where our module names would shadow others (transformers looks for
    # a package called "kernels"). The vendored gguf must win over an installed one of another revision.
    sys.path[0:1] = [folder, os.path.join(folder, "gguf-py")]
    if spec["pre_tokenizer"]:
        from conversion import base

        base.TextModel.get_vocab_base_pre = lambda self, tokenizer: spec["pre_tokenizer"]
    script = os.path.join(folder, "convert_hf_to_gguf.py")
    for job in spec["jobs"]:
        sys.argv = [script, *job]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
