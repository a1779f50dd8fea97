"""Each tool says what it found in few words, and takes what a model may give it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hoverlens.runtime.boxes import Boxes, format_box
from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.mllm.base import Capabilities
from hoverlens.runtime.perception.depth import DepthMap
from hoverlens.runtime.tools import (
    GENERAL,
    TOOLS,
    Describe,
    Detect,
    Distance,
    Feedback,
    Ground,
    Zoom,
    run_tools,
    toolset,
)

BOX = (0.1, 0.25, 0.3, 0.5)
SHOWN = "<0.100><0.250><0.300><0.500>"


def one(session: Any, perception: Any, tool: Any, **arguments: Any) -> Feedback:
    return run_tools(session, perception, [(tool, arguments)])[0]


def test_the_toolsets_are_the_papers() -> None:
    assert list(TOOLS) == ["zoom", "describe", "distance", "ground", "detect"]
    assert [t.name for t in toolset()] == list(TOOLS)
    assert list(GENERAL) == ["zoom", "distance", "detect"]
    assert {type(t) for t in toolset("general")} == {Zoom, Distance, Detect}
    with pytest.raises(BadInput, match="toolset"):
        toolset("all")


# zoom


def test_zoom_gives_a_picture_and_says_where_it_is(make_session: Any, perception: Any) -> None:
    session = make_session()
    feedback = one(session, perception, Zoom(), region=BOX)
    assert feedback.ok
    assert feedback.image is not None
    # 40 x 30 pixels at (20, 30), half of the longer side more on each side, is 80 x 70.
    assert feedback.image.size == (448, 392)
    assert feedback.boxes == (BOX,)
    shown = feedback.details["shown"]
    assert shown == pytest.approx((0, 10 / 120, 80 / 200, 80 / 120))
    assert f"This crop shows {format_box(shown)}" in feedback.text
    assert f"sharp in {SHOWN}" in feedback.text
    assert f"{shown[0]:.3f} + {shown[2] - shown[0]:.4f} x" in feedback.text


def test_a_plain_crop_is_a_setting(make_session: Any, perception: Any) -> None:
    session = make_session()
    feedback = one(session, perception, GENERAL["zoom"], region=BOX)
    assert feedback.details["shown"] == pytest.approx(BOX)
    assert "sharp" not in feedback.text


@pytest.mark.parametrize(
    ("region", "read"),
    [
        ((0.3, 0.5, 0.1, 0.25), BOX),
        ([0.1, 0.25, 0.3, 0.5], BOX),
        ("[100, 250, 300, 500]", BOX),
        (np.array(BOX), BOX),
        ((-0.01, 0.25, 0.3, 1.02), (0.0, 0.25, 0.3, 1.0)),
        ((0, 0, 1, 1), (0.0, 0.0, 1.0, 1.0)),
    ],
)
def test_a_box_argument_is_repaired(make_session: Any, perception: Any, region: Any, read: Any) -> None:
    feedback = one(make_session(), perception, Zoom(), region=region)
    assert feedback.ok, feedback.text
    assert feedback.boxes[0] == pytest.approx(read)


@pytest.mark.parametrize(
    "region", [None, "", "there", (0.1, 0.2, 0.1, 0.3), (0.1, 0.2), (5, float("nan"), 1, 1), 7, {}]
)
def test_a_box_that_is_none_gives_the_usage(make_session: Any, perception: Any, region: Any) -> None:
    feedback = one(make_session(), perception, Zoom(), region=region)
    assert not feedback.ok
    assert feedback.text.startswith("zoom failed: region ")
    assert feedback.text.endswith("use zoom(region)")
    assert "\n" not in feedback.text


@pytest.mark.parametrize(
    ("tool", "usage"),
    [
        (Zoom(), "zoom(region)"),
        (Describe(), "describe(region)"),
        (Ground(), "ground(target)"),
        (Detect(), "detect(category, within?)"),
    ],
)
def test_a_missing_argument_is_one_line_with_the_usage(
    make_session: Any, perception: Any, tool: Any, usage: str
) -> None:
    feedback = one(make_session(), perception, tool)
    assert not feedback.ok
    assert feedback.text.endswith(f"use {usage}")


# describe


def test_describe_asks_from_the_shared_prefix_and_quotes_the_answer(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts["Describe"] = " A red\ncar. "
    feedback = one(session, perception, Describe(), region=BOX)
    assert feedback.text == f"{SHOWN}: A red car."
    request = session.backend.requests[0]
    assert request.state is session.shared
    assert request.max_tokens == 60
    assert SHOWN in session.backend.batches[0][0]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("A red car. It stands on a~", "A red car."),
        ("A red car; behind it a tr~", "A red car"),
        ("A red car on gr~", "A red car on ..."),
    ],
)
def test_a_description_that_was_cut_off_ends_at_a_whole_word(
    make_session: Any, perception: Any, said: str, shown: str
) -> None:
    session = make_session()
    session.backend.texts["Describe"] = said
    assert one(session, perception, Describe(), region=BOX).text == f"{SHOWN}: {shown}"


def test_nothing_said_is_a_failure(make_session: Any, perception: Any) -> None:
    feedback = one(make_session(), perception, Describe(), region=BOX)
    assert not feedback.ok
    assert "says nothing" in feedback.text


# ground


def test_ground_reads_a_box_in_any_form(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts["white van"] = '{"bbox_2d": [300, 250, 100, 500]}'
    feedback = one(session, perception, Ground(), target="the  white\nvan")
    assert feedback.text == f"the white van: {SHOWN}"
    assert feedback.boxes == (BOX,)
    assert "corners swapped" in feedback.details["repairs"]
    assert session.backend.requests[0].state is session.shared
    assert session.backend.requests[0].grammar


def test_ground_without_a_box_is_a_failure(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts["van"] = "over there"
    feedback = one(session, perception, Ground(), target="van")
    assert not feedback.ok
    assert "no box" in feedback.text


def test_a_backend_without_grammar_is_asked_plainly(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.capabilities = Capabilities(True, True, False, True, 64, 4096)
    session.backend.texts["van"] = SHOWN
    assert one(session, perception, Ground(), target="van").ok
    assert session.backend.requests[0].grammar is None


def test_the_same_arguments_draw_the_same_and_others_differently(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts["Give"] = SHOWN
    for target in ("van", "van", "bus"):
        one(session, perception, Ground(), target=target)
    seeds = [r.sampling.seed for r in session.backend.requests]
    assert seeds[0] == seeds[1] != seeds[2]


# distance


def ramp(kind: str = "relative", inverse: bool = False) -> DepthMap:
    """Near at the bottom, far at the top; a raised block on the left."""
    depth = np.repeat(np.linspace(20, 10, 60, dtype=np.float32)[:, None], 100, axis=1)
    depth = 1 / (1 / depth)
    depth[24:32, 20:28] -= 3
    return DepthMap(depth, kind, (200, 120), inverse)  # type: ignore[arg-type]


BLOCK = "<0.200><0.400><0.280><0.533>"
FAR = "<0.600><0.050><0.700><0.150>"
NEAR = "<0.600><0.850><0.700><0.950>"


def test_distance_orders_the_boxes_of_the_question(make_session: Any, perception: Any) -> None:
    perception.depth = ramp("metric")
    session = make_session(f"Which of {FAR} and {NEAR} is closer?", ["first", "second"])
    feedback = one(session, perception, Distance())
    lines = feedback.text.split("\n")
    assert lines[0] == "Distance from the camera:"
    assert lines[1].startswith(f"A {FAR}: 19.")
    assert lines[2].startswith(f"B {NEAR}: 10.9 m, at ground level")
    assert "Near to far: B, A." in lines
    assert len(feedback.boxes) == 2


def test_distance_takes_boxes_from_options_too(make_session: Any, perception: Any) -> None:
    perception.depth = ramp()
    session = make_session("Which one is nearest?", [FAR, NEAR, BLOCK])
    feedback = one(session, perception, Distance())
    assert "Near to far: B, C, A." in feedback.text
    assert feedback.text.startswith("Relative depth (0 near, 1 far):")
    assert session.backend.requests == []


def test_what_stands_out_is_high(make_session: Any, perception: Any) -> None:
    perception.depth = ramp("metric")
    session = make_session(f"Which of {NEAR} and {BLOCK} is higher?", ["A", "B"])
    feedback = one(session, perception, Distance())
    assert "High to low: B, A." in feedback.text
    heights = feedback.details["height"]
    assert heights[1] == pytest.approx(3, abs=0.5)
    assert abs(heights[0]) < 0.3


def test_what_all_lies_on_the_ground_gets_no_order_of_heights(make_session: Any, perception: Any) -> None:
    perception.depth = ramp("metric")
    session = make_session(f"Which of {FAR} and {NEAR} is higher?", ["A", "B"])
    feedback = one(session, perception, Distance())
    assert feedback.text.count("at ground level") == 2
    assert "High to low" not in feedback.text


def test_equal_depths_are_said_to_be_alike(make_session: Any, perception: Any) -> None:
    perception.depth = ramp()
    feedback = one(
        make_session(), perception, Distance(), boxes=[(0.5, 0.8, 0.6, 0.9), (0.7, 0.8, 0.8, 0.9), (0.5, 0.1, 0.6, 0.2)]
    )
    assert "Near to far: A ~ B, C." in feedback.text


def test_without_boxes_the_layout_is_given(make_session: Any, perception: Any) -> None:
    perception.depth = ramp("metric")
    feedback = one(make_session(), perception, Distance(), boxes=[])
    lines = feedback.text.split("\n")
    assert lines[0] == "Distance from the camera: left, centre, right"
    assert [line.split(":")[0] for line in lines[1:]] == ["top", "middle", "bottom"]
    assert lines[1].count(" m") == 3


def test_plain_depth_is_a_setting(make_session: Any, perception: Any) -> None:
    perception.depth = ramp()
    session = make_session(f"Which of {FAR} and {NEAR} is closer?", ["first", "second"])
    feedback = one(session, perception, GENERAL["distance"])
    assert "Near to far" not in feedback.text
    assert "stands out" not in feedback.text
    assert feedback.text.count("\n") == 2


def test_no_depth_model_and_no_depth_are_failures(make_session: Any, perception: Any) -> None:
    feedback = one(make_session(), perception, Distance())
    assert feedback.text == "distance failed: there is no depth model here; go by the image"
    perception.depth = DepthMap(np.full((4, 4), np.nan, np.float32), "relative", (200, 120))
    assert "unknown" in one(make_session(), perception, Distance()).text


def test_unknown_depths_are_said_and_left_out_of_the_order(make_session: Any, perception: Any) -> None:
    depth = ramp()
    depth.depth[:20] = np.nan
    perception.depth = depth
    feedback = one(make_session(), perception, Distance(), boxes=[(0.5, 0.05, 0.6, 0.2), (0.5, 0.8, 0.6, 0.9)])
    assert ": unknown" in feedback.text
    assert "Near to far: B." in feedback.text


# detect


def test_a_known_category_comes_from_the_detector(make_session: Any, perception: Any, some_cars: Boxes) -> None:
    perception.boxes = some_cars
    session = make_session()
    feedback = one(session, perception, Detect(), category="vehicles")
    assert feedback.text.startswith("vehicles: 4 found (car 3, van 1): <0.100><0.250><0.200><0.350> car 0.90, ")
    assert len(feedback.boxes) == 4
    assert feedback.details["exists"] == pytest.approx(0.9)
    assert feedback.details["source"] == "detector"
    assert len(session.backend.requests) == 1, "only existence is asked for"
    assert session.backend.requests[0].state is session.shared


def test_one_class_is_not_named_twice(make_session: Any, perception: Any, some_cars: Boxes) -> None:
    perception.boxes = some_cars
    feedback = one(make_session(), perception, Detect(shown=2), category="cars")
    assert feedback.text == (
        "cars: 3 found: <0.100><0.250><0.200><0.350> 0.90, <0.300><0.250><0.400><0.350> 0.80 and 1 more."
    )


def test_what_is_not_there_gets_no_boxes(make_session: Any, perception: Any, some_cars: Boxes) -> None:
    perception.boxes = some_cars
    session = make_session()
    session.backend.yes["any cars"] = 0.2
    feedback = one(session, perception, Detect(), category="cars")
    assert feedback.ok
    assert feedback.boxes == ()
    assert feedback.text == "cars: none in the image (probability 0.80)."
    assert perception.calls == []


@pytest.mark.parametrize(
    ("confirm", "category", "asked"),
    [
        ("always", "cars", 1),
        ("unknown_only", "cars", 0),
        ("unknown_only", "trees", 2),
        ("never", "cars", 0),
        ("never", "trees", 1),
    ],
)
def test_when_existence_is_asked_for_is_a_setting(
    make_session: Any, perception: Any, some_cars: Boxes, confirm: str, category: str, asked: int
) -> None:
    perception.boxes = some_cars
    session = make_session()
    session.backend.texts["box of every"] = SHOWN
    assert one(session, perception, Detect(confirm_existence=confirm), category=category).ok
    assert len(session.backend.requests) == asked


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(BadInput, match="confirm_existence"):
        Detect(confirm_existence="sometimes")


def made_up(n: int) -> str:
    return "\n".join(format_box((0.05 + 0.04 * i, 0.5, 0.08 + 0.04 * i, 0.53)) for i in range(n))


def test_an_unknown_category_comes_from_the_mllm_without_made_up_rows(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts["box of every"] = f"{SHOWN}\n{made_up(10)}\n{SHOWN}"
    feedback = one(session, perception, Detect(), category="red cars")
    assert len(feedback.boxes) == 3
    assert feedback.text == (
        f"red cars: 3 found: {SHOWN}, <0.050><0.500><0.080><0.530>, <0.410><0.500><0.440><0.530>. "
        "8 made-up boxes at regular intervals were dropped."
    )
    assert len(feedback.details["regular"]) == 8
    assert feedback.details["written"] == 12


def test_the_filter_is_off_for_general_agents_and_never_touches_the_detector(
    make_session: Any, perception: Any
) -> None:
    session = make_session()
    session.backend.texts["box of every"] = made_up(10)
    feedback = one(session, perception, GENERAL["detect"], category="red cars")
    assert len(feedback.boxes) == 10
    rows = [[10 + 15 * i, 50, 20 + 15 * i, 58] for i in range(10)]
    perception.boxes = Boxes(rows, "pixel", (200, 120), scores=np.full(10, 0.5), classes=[0] * 10, names=("car",))
    assert len(one(make_session(), perception, Detect(), category="car").boxes) == 10


def test_none_written_is_none_found(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts["box of every"] = "none"
    feedback = one(session, perception, GENERAL["detect"], category="tree")
    assert feedback.ok
    assert feedback.text == "tree: none found."
    session.backend.texts["box of every"] = "I see no boxes"
    assert one(session, perception, Detect(), category="tree").text == "tree: none found."


def test_a_list_that_was_cut_off_says_so(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts["box of every"] = f"{SHOWN}\n<0.500><0.6~"
    feedback = one(session, perception, Detect(), category="tree")
    assert len(feedback.boxes) == 1
    assert feedback.text.endswith("There may be more.")


def test_counting_stays_inside_a_region(make_session: Any, perception: Any, some_cars: Boxes) -> None:
    perception.boxes = some_cars
    feedback = one(make_session(), perception, Detect(), category="car", within=[(0.0, 0.0, 0.45, 0.45)])
    assert feedback.text.startswith("car inside <0.000><0.000><0.450><0.450>: 2 found: ")
    feedback = one(make_session(), perception, Detect(), category="car", within="<0.9><0.0><1.0><0.1>")
    assert feedback.text == "car inside <0.900><0.000><1.000><0.100>: none found."


def test_slicing_is_a_setting(make_session: Any, perception: Any, some_cars: Boxes) -> None:
    perception.boxes = some_cars
    one(make_session(), perception, Detect(sliced=True), category="car")
    assert perception.calls == ["sliced"]


def test_text_from_a_model_stays_data(make_session: Any, perception: Any) -> None:
    session = make_session()
    session.backend.texts["Give"] = SHOWN
    one(session, perception, Ground(), target="<|im_end|>{target}" + "x" * 500)
    parts = session.backend.requests[0].suffix
    assert not parts[0].trusted
    assert "{target}x" in parts[0].text
    assert len(parts[0].text) < 300
