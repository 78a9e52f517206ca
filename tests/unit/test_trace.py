"""`penstock trace`: spans from recorded times, as Perfetto's JSON and as OpenTelemetry's spans."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from stream.codec import encode
from stream.errors import PenstockError
from stream.records import ActivityTime, Completion, Group, Prompt, ToolRun
from stream.trainer.archive import Archive
from stream.trainer.ledger_records import LedgerRecord, Trained, content_hash
from workers.rollout.episode import measure_time
from workers.runs.find import open_run
from workers.runs.opentelemetry_export import export_spans
from workers.runs.phases import StepTimes, group_phase, read_steps, trace_id
from workers.runs.trace import perfetto_trace, write_perfetto

TOOL_CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "add"}}]}
STEP = StepTimes(number=3, began_at=120.0, ended_at=125.0, publish_began_at=126.0, publish_ended_at=127.0)


def make_group(prompt="p", offset=0.0, **times):
    activities = [("reset", 101, 1), ("engine", 102, 3), ("tools", 105, 2), ("engine", 107, 1), ("reward", 108, 0.5)]
    completion = Completion(
        index=0,
        turns=2,
        messages=[
            TOOL_CALL,
            {"role": "tool", "tool_call_id": "1", "content": "3"},
            {"role": "assistant", "content": "3"},
        ],
        tool_runs=[ToolRun(1.5)],
        activity_times=[
            ActivityTime(name, at + offset, seconds) for name, at, seconds in [*activities, ("total", 101, 8)]
        ],
    )
    known = {"claimed_at": 100.0, "rolled_out_at": 110.0, "score_claimed_at": 111.0, "scored_at": 113.0} | times
    fed_at = 90.0 + offset
    return Group(
        prompt=Prompt(id=prompt, messages=[], fed_at=fed_at),
        completions=[completion],
        worker="rollout-1",
        **{name: at and at + offset for name, at in known.items()},
    )


def names(span):
    return [child.name for child in span.children]


def test_a_group_is_one_span_from_the_feeder_to_the_publication():
    span = group_phase(make_group(), "trained", STEP)
    assert (span.began_at, span.ended_at) == (90.0, 127.0)
    assert names(span) == [
        *("wait for a rollout worker", "rollout p", "wait for a scorer", "score", "wait for the trainer"),
        *("train", "publish"),
    ]
    (completion,) = span.children[1].children
    assert names(completion) == ["reset", "turn 1", "tools: add 1.5 s", "turn 2", "reward"]
    assert all(part.began_at >= span.began_at and part.ended_at <= span.ended_at for part in span.children)


def test_times_that_are_missing_leave_their_spans_out():
    group = make_group(score_claimed_at=0.0)
    group.completions[0].activity_times.clear()
    span = group_phase(group, "dropped:ties", None)
    assert names(span) == ["wait for a rollout worker", "rollout p", "score"]
    assert not span.children[1].children
    assert group_phase(Group(prompt=Prompt(id="p", messages=[]), completions=[]), "trained", None) is None


def test_a_publication_belongs_to_the_steps_before_it():
    lines = [
        {"step": 1, "time": 10.0, "seconds": 2.0, "publish/time": 5.0, "publish/seconds": 1.0},
        {"step": 2, "time": 20.0, "seconds": 2.0, "publish/time": 5.0, "publish/seconds": 1.0},
        {"step": 3, "time": 30.0, "seconds": 2.0, "publish/time": 24.0, "publish/seconds": 3.0},
    ]
    found = read_steps(lines)
    assert [(step.began_at, step.publish_began_at, step.publish_ended_at) for step in found.values()] == [
        (8.0, 0.0, 0.0),
        (18.0, 21.0, 24.0),
        (28.0, 0.0, 0.0),
    ]


def test_slices_of_a_lane_never_overlap_and_children_lie_within_their_parents():
    groups = [group_phase(make_group(f"p{i}", offset=i * 1.5), "trained", STEP) for i in range(6)]
    trace = json.loads(json.dumps(perfetto_trace(groups, {3: STEP})))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    open_until: dict = {}
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        stack = open_until.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        assert not stack or event["ts"] + event["dur"] <= stack[-1], event
        stack.append(event["ts"] + event["dur"])
    places = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert places == {
        "queue of prompts", "rollout-1", "queue of groups", "score", "queue of scored groups", "train"
    }  # fmt: skip
    assert sum(event["name"] == "train step 3" for event in slices) == 1
    arrows = [event for event in trace["traceEvents"] if event["ph"] in "stf"]
    assert len({event["id"] for event in arrows}) == 6
    (train,) = [event for event in slices if event["name"] == "train step 3"]
    ends = [event for event in arrows if event["ph"] == "f"]
    assert [(event["pid"], event["tid"]) for event in ends] == [(train["pid"], train["tid"])] * 6
    kinds = [event["ph"] for event in sorted(arrows, key=lambda event: event["ts"]) if event["id"] == ends[0]["id"]]
    assert kinds == ["s", "t", "t", "t", "t", "f"]


EVENT_FIELDS = {
    "X": {"name": str, "cat": str, "ts": int, "dur": int, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "ts": int, "id": int, "bp": str, "pid": int, "tid": int},
    "M": {"name": str, "pid": int, "args": dict},
}
"""Fields of Chrome's Trace Event Format by phase; `t` and `f` are like `s`, and a lane's name has a `tid`."""


def test_every_event_is_strictly_of_the_trace_event_format():
    groups = [group_phase(make_group(f"p{i}", offset=i * 1.5), "trained", STEP) for i in range(6)]
    trace = json.loads(json.dumps(perfetto_trace(groups, {3: STEP})))
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named, used = set(), set()
    for event in trace["traceEvents"]:
        fields = dict(EVENT_FIELDS["s" if event["ph"] in "tf" else event["ph"]])
        if event["name"] == "thread_name":
            fields["tid"] = int
        assert {key: type(value) for key, value in event.items() if key != "ph"} == fields, event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert list(event["args"]) == ["name"]
            named.add((event["pid"], event.get("tid")))
        else:
            used |= {(event["pid"], event["tid"]), (event["pid"], None)}
        if event["ph"] in "stf":  # an arrow is bound to the slice that encloses it
            assert any(
                (each["pid"], each["tid"]) == (event["pid"], event["tid"])
                and each["ts"] <= event["ts"] <= each["ts"] + each["dur"]
                for each in trace["traceEvents"]
                if each["ph"] == "X"
            ), event
    assert named == used


def test_the_time_of_each_activity_is_recorded_and_their_number_is_bounded():
    completion = Completion(index=0, seconds={"engine": 0.0})
    for _ in range(1100):
        with measure_time(completion, "engine"):
            pass
    assert len(completion.activity_times) == 1000
    assert completion.activity_times[0].began_at <= completion.activity_times[-1].began_at
    assert completion.seconds["engine"] >= sum(each.seconds for each in completion.activity_times)


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(
        f'[run]\nname = "r"\nfolder = "{folder}"\n'
        '[model]\npath = "m"\n[data]\npath = "p.jsonl"\n[[rewards]]\nref = "math"\n'
    )
    group = make_group()
    archive = Archive(folder / "groups", None)
    record = LedgerRecord("p", Trained(), 3, 2, content_hash(group))
    archive.write([(record, encode(group))], {})
    archive.close()
    (folder / "metrics.jsonl").write_text('{"step": 3, "time": 125.0, "seconds": 5.0}\n{"step": 4, "ti')
    return folder


def test_the_folder_of_a_killed_run_is_enough(run_folder, tmp_path):
    file = tmp_path / "trace.json"
    traced = open_run(run_folder).trace(count=10)
    assert len(traced.groups) == 1
    write_perfetto(traced, file)
    written = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    assert "turn 2" in written
    assert "train step 3" in written
    with pytest.raises(PenstockError, match="no archived group of steps 7"):
        open_run(run_folder).trace("7")


def test_a_collector_gets_one_trace_per_group_with_the_id_of_its_prompt(run_folder):
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        groups = open_run(run_folder).trace().groups
        assert export_spans(groups, "r", f"http://127.0.0.1:{server.server_port}") == 1
    finally:
        server.shutdown()
        server.server_close()
    request = service.ExportTraceServiceRequest.FromString(bodies[0])
    spans = request.resource_spans[0].scope_spans[0].spans
    assert {span.trace_id.hex() for span in spans} == {trace_id("r", "p")}
    by_name = {span.name: span for span in spans}
    assert by_name["turn 1"].parent_span_id == by_name["completion 0"].span_id
    assert by_name["turn 1"].start_time_unix_nano == 102 * 10**9
    assert not by_name["group p"].parent_span_id


def test_a_run_without_a_logged_step_has_no_steps():
    assert read_steps([]) == {}


def test_a_trace_that_cannot_be_written_is_an_error_by_name(run_folder, tmp_path):
    with pytest.raises(PenstockError, match=r"nowhere/trace\.json could not be written: No such file"):
        write_perfetto(open_run(run_folder).trace(), tmp_path / "nowhere" / "trace.json")
