"""How busy are the streams of a trace, and how much communication is hidden under compute? (Chrome Trace Event files, of any size.)

Two kinds of trace are understood. A profiler's (https://pytorch.org/docs/stable/profiler.html): events of category "kernel" with the device
and stream among their arguments, communication told by the kernel's name, copies and fills apart. And those that this project writes: one
process a rank, threads named after the simulator's streams, of which all but "compute" communicate.

The file is read event by event, never as a whole; of each event that counts two integers are kept, nanoseconds from the trace's own zero, so
that no clock of 1e15 microseconds loses the last digits. Where streams overlap, "busy" counts the time once.
"""

from __future__ import annotations

import gzip
import json
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any

import numpy as np

from moesim.program import COMPUTE, STREAMS

CHUNK = 1 << 20
LONGEST_EVENT = 1 << 24
"""Bytes of one event beyond which a file is no trace."""
MOST_EVENTS = 50_000_000
KERNEL, COPY = ("kernel", "Kernel"), ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
COMMUNICATION = r"nccl|rccl|nvshmem|deep_?ep|(intra|inter)node::|cross_device_reduce|all_?(reduce|gather|to_?all)|reduce_?scatter|send_?recv|\b(notify_)?(dispatch|combine)\b"
"""Names of kernels that communicate: NCCL's and RCCL's, DeepEP's, NVSHMEM's, custom all-reduces."""
NOT_COMMUNICATION = r"flash|attn|attention|split_?k"
"""Kernels that combine partial results of their own device."""
COMPUTE_KIND, COMM_KIND, COPY_KIND = "compute", "communication", "copy"


@dataclass(frozen=True)
class StreamUse:
    """Seconds that one stream runs kernels of each kind, and how many."""

    stream: str
    busy: Mapping[str, float]
    kernels: int


@dataclass(frozen=True)
class DeviceUse:
    """One device over its own makespan (from its first event to its last), seconds: compute, communication and copy busy on any stream;
    ``hidden`` communication runs while something computes; ``idle`` is when nothing runs."""

    device: str
    makespan: float
    compute: float
    communication: float
    copy: float
    hidden: float
    idle: float
    streams: tuple[StreamUse, ...]

    @property
    def hidden_share(self) -> float | None:
        """Of the communication; None where there is none."""
        return self.hidden / self.communication if self.communication else None


@dataclass(frozen=True)
class TraceUse:
    """Every device of a trace. events: read in all; used: kernels, copies or spans among them; cut: reading stopped at the limit."""

    devices: tuple[DeviceUse, ...]
    events: int
    used: int
    cut: bool


def read_trace(path: str | Path, communication: str | None = None, most: int = MOST_EVENTS) -> TraceUse:
    """What a trace says, gzip or not. ``communication``: a regular expression for names of kernels that communicate, in place of the one
    above. most: events to read. ValueError in one line for what is no trace, or holds no kernel."""
    tell = _teller(communication)
    lanes: dict[tuple[Any, Any], str] = {}
    times: dict[tuple[str, str, str], array] = defaultdict(lambda: array("q"))
    count = used = 0
    with _open(Path(path)) as file:
        for event in events(file, str(path)):
            count += 1
            if event.get("ph") == "M" and event.get("name") == "thread_name":
                _name_lane(lanes, event)
            elif event.get("ph") == "X" and (where := _place(event, lanes, tell)) is not None:
                start, length = (_nanoseconds(event.get(key, 0), path, count) for key in ("ts", "dur"))
                if length < 0:
                    raise ValueError(f"{path}: event {count} lasts {event.get('dur')} microseconds")
                times[where].extend((start, start + length))
                used += 1
            if count >= most:
                break
    if not used:
        raise ValueError(f"{path}: {count} events, no kernel of a device and no span of this project among them")
    return TraceUse(tuple(_device(name, times) for name in sorted({device for device, _, _ in times}, key=_numbers)), count, used, count >= most)


# --- which events count, and as what ------------------------------------------------------------------------------------------


def _teller(communication: str | None):
    """name of a kernel -> does it communicate?"""
    try:
        yes, no = re.compile(communication or COMMUNICATION, re.IGNORECASE), re.compile(NOT_COMMUNICATION, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"communication {communication!r} is no regular expression: {error}") from None
    known: dict[str, bool] = {}

    def tell(name: str) -> bool:
        if name not in known:
            # In C++ names a word may be written with underscores around it.
            spaced = name.replace("_", " ")
            known[name] = bool(yes.search(name) or yes.search(spaced)) and (communication is not None or not no.search(name))
        return known[name]

    return tell


def _name_lane(lanes: dict[tuple[Any, Any], str], event: Mapping[str, Any]) -> None:
    name = event.get("args", {}).get("name") if isinstance(event.get("args"), dict) else None
    if name in STREAMS:
        lanes[event.get("pid"), event.get("tid")] = name


def _place(event: Mapping[str, Any], lanes: Mapping[tuple[Any, Any], str], tell) -> tuple[str, str, str] | None:
    """(device, stream, kind) of an event that counts."""
    category, args = event.get("cat"), event.get("args") if isinstance(event.get("args"), dict) else {}
    if category in KERNEL or category in COPY:
        name = str(event.get("name", ""))
        kind = (COMM_KIND if tell(name) else COMPUTE_KIND) if category in KERNEL else COMM_KIND if "PtoP" in name else COPY_KIND
        return f"device {args.get('device', event.get('pid'))}", f"stream {args.get('stream', event.get('tid'))}", kind
    stream = lanes.get((event.get("pid"), event.get("tid")))
    if stream is None:
        return None
    return f"rank {event.get('pid')}", stream, COMPUTE_KIND if stream == STREAMS[COMPUTE] else COMM_KIND


def _nanoseconds(value: Any, path: str | Path, number: int) -> int:
    """Microseconds as they stand in the file, exactly."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value * 1000
    try:
        return round(Decimal(str(value)) * 1000)
    except (InvalidOperation, ValueError, OverflowError):
        raise ValueError(f"{path}: event {number}: {str(value)[:40]!r} is no time in microseconds") from None


# --- busy, hidden, idle -------------------------------------------------------------------------------------------------------


def _device(name: str, times: Mapping[tuple[str, str, str], array]) -> DeviceUse:
    own = {(stream, kind): _intervals(found) for (device, stream, kind), found in times.items() if device == name}
    by_kind = {kind: merged([found for (_, k), found in own.items() if k == kind]) for kind in (COMPUTE_KIND, COMM_KIND, COPY_KIND)}
    everything = merged(list(by_kind.values()))
    makespan = int(everything[:, 1].max() - everything[:, 0].min())
    busy = {kind: length(found) for kind, found in by_kind.items()}
    hidden = busy[COMPUTE_KIND] + busy[COMM_KIND] - length(merged([by_kind[COMPUTE_KIND], by_kind[COMM_KIND]]))
    streams = []
    for stream in sorted({stream for stream, _ in own}, key=_numbers):
        mine = {kind: found for (s, kind), found in own.items() if s == stream}
        streams.append(StreamUse(stream, {kind: length(merged([found])) * 1e-9 for kind, found in sorted(mine.items())}, sum(map(len, mine.values()))))
    return DeviceUse(name, makespan * 1e-9, *(busy[k] * 1e-9 for k in (COMPUTE_KIND, COMM_KIND, COPY_KIND)), hidden * 1e-9,
                     (makespan - length(everything)) * 1e-9, tuple(streams))


def _intervals(flat: array) -> np.ndarray:
    return np.frombuffer(flat, dtype=np.int64).reshape(-1, 2)


def merged(lists: list[np.ndarray]) -> np.ndarray:
    """The union of intervals [n, 2], as intervals that don't touch, in order."""
    found = np.concatenate([np.empty((0, 2), dtype=np.int64), *lists])
    if not len(found):
        return found
    found = found[np.argsort(found[:, 0], kind="stable")]
    ends = np.maximum.accumulate(found[:, 1])
    first = np.concatenate([[True], found[1:, 0] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([found[first, 0], ends[last]], axis=1)


def length(intervals: np.ndarray) -> int:
    """Of intervals that don't overlap."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def _numbers(text: str) -> tuple[Any, ...]:
    """Sorts "stream 7" before "stream 20"."""
    return tuple((0, int(word), "") if word.isdecimal() else (1, 0, word) for word in text.split())


# --- events of a file, one after another ----------------------------------------------------------------------------------------


def _open(path: Path) -> IO[str]:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8", errors="replace") if zipped else path.open(encoding="utf-8", errors="replace")


def events(file: IO[str], name: str) -> Iterator[Mapping[str, Any]]:
    """Events of an object's "traceEvents", or of a list (which may lack its end, as the format allows). Fractions are left as text.
    ValueError names the event behind which the file is broken."""
    decoder = json.JSONDecoder(parse_float=str)
    try:
        text, is_list = _beginning(file, name)
        at = number = 0
        while True:
            text, at = _next(file, text, at)
            if at >= len(text):
                if is_list:
                    return
                raise ValueError(f"{name}: cut short after {number} events")
            if text[at] == "]":
                return
            event, text, at = _decode(decoder, file, text, at, name, number)
            number += 1
            if isinstance(event, dict):
                yield event
    except (EOFError, gzip.BadGzipFile, OSError) as error:
        raise ValueError(f"{name}: {' '.join(str(error).split()) or 'cut short'}") from None


def _beginning(file: IO[str], name: str) -> tuple[str, bool]:
    """(text from the first event on, is it a bare list?)."""
    text = file.read(CHUNK)
    if text.lstrip()[:1] == "[":
        return text[text.index("[") + 1:], True
    if text.lstrip()[:1] != "{":
        raise ValueError(f"{name}: neither a list of events nor an object with traceEvents: {text[:40]!r}")
    while (found := re.search(r'"traceEvents"\s*:\s*\[', text)) is None:
        more = file.read(CHUNK)
        if not more:
            raise ValueError(f"{name}: no list of traceEvents")
        text = text[-64:] + more
    return text[found.end():], False


def _next(file: IO[str], text: str, at: int) -> tuple[str, int]:
    """Past blanks and commas; more is read where the text ends."""
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text):
            return text, at
        text, at = file.read(CHUNK), 0
        if not text:
            return text, 0


def _decode(decoder: json.JSONDecoder, file: IO[str], text: str, at: int, name: str, number: int) -> tuple[Any, str, int]:
    """(event, text, where the next begins)."""
    size = CHUNK
    while True:
        try:
            event, end = decoder.raw_decode(text, at)
            if end < len(text) or isinstance(event, dict):  # else a number whose digits may go on
                return event, text, end
        except (ValueError, RecursionError):
            pass  # an event that goes on behind what was read, or is none
        more = file.read(size)
        if not more or len(text) - at > LONGEST_EVENT:
            raise ValueError(f"{name}: broken behind event {number}: {text[at:at + 40]!r}")
        text, at, size = text[at:] + more, 0, 2 * size


def lines(found: TraceUse) -> list[str]:
    """A line a device and a line a stream."""
    out = [f"{found.used} of {found.events} events run on a device" + (" (the rest was not read)" if found.cut else "")]
    for d in found.devices:
        share = "-" if d.hidden_share is None else f"{d.hidden_share:.1%}"
        out.append(f"{d.device:12} makespan {d.makespan * 1e3:11.3f} ms  compute {d.compute * 1e3:11.3f} ms ({d.compute / (d.makespan or 1):.1%})  communication "
                   f"{d.communication * 1e3:11.3f} ms, {share} of it hidden under compute  copies {d.copy * 1e3:9.3f} ms  idle {d.idle * 1e3:11.3f} ms")
        for s in d.streams:
            kinds = "  ".join(f"{kind} {seconds * 1e3:.3f} ms" for kind, seconds in s.busy.items())
            out.append(f"  {s.stream:12} {s.kernels:8d} events  {kinds}")
    return out
