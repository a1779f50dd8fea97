"""Runs a checkpoint in torch for the self-test, in a process of its own; started by file name, never imported.

Its argument is a folder with ``request.json`` and pictures; it leaves ``reference.json`` and arrays there.
"""

import json
import os
import sys
from typing import Any

import numpy as np


def main() -> None:
    folder = sys.argv[1]
    # Python put this file's folder first, where our module names would shadow others.
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # end with the parent
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    with open(os.path.join(folder, "request.json"), encoding="utf-8") as f:
        request = json.load(f)
    torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    source = request["checkpoint"]
    local = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(source, **local)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in request["texts"]]
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32, use_safetensors=True, **local)
    model.eval()
    result = {"texts": ids, "tokens": []}
    logits, features = [], []
    with torch.inference_mode():
        for i, prompt in enumerate(request["prompts"]):
            inputs = {"input_ids": torch.tensor([prompt["ids"]])}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            if prompt["grid"]:
                pixels = torch.from_numpy(np.load(os.path.join(folder, f"pixels{i}.npy"), allow_pickle=False))
                grid = torch.tensor([prompt["grid"]])
                inputs |= {"pixel_values": pixels, "image_grid_thw": grid}
                inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
                features.append(image_features(model.model, pixels, grid))
            out = model.generate(
                **inputs,
                max_new_tokens=request["n_tokens"],
                min_new_tokens=request["n_tokens"],
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            result["tokens"].append(out.sequences[0, len(prompt["ids"]) :].tolist())
            logits.append(torch.stack(out.logits, 1)[0].float().numpy())
    np.save(os.path.join(folder, "logits.npy"), np.stack(logits), allow_pickle=False)
    if features:
        np.save(os.path.join(folder, "features.npy"), np.stack(features), allow_pickle=False)
    with open(os.path.join(folder, "reference.json"), "w", encoding="utf-8") as f:
        json.dump(result, f)


def image_features(model: Any, pixels: Any, grid: Any) -> Any:
    """What the text model reads: the merged features, then those of the deepstack layers, side by side."""
    import torch

    def whole(part: Any) -> Any:  # newer versions give one tensor a picture
        return torch.cat(list(part)) if isinstance(part, (list, tuple)) else part

    found = model.get_image_features(pixels, grid)
    named = hasattr(found, "pooler_output")
    main = found.pooler_output if named else found[0]
    deep = getattr(found, "deepstack_features", None) if named else found[1]
    return torch.cat([whole(main), *(whole(d) for d in deep or [])], dim=-1).float().numpy()


if __name__ == "__main__":
    main()
