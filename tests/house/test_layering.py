"""The rooms of the house: who may include what. Reads every #include of the tree.

ROOMS is the table; docs/architecture.md has the picture. An include that is not allowed fails here:
layers erode unless a machine watches.
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = (".h", ".cc", ".cu", ".cuh")

# Longest prefix wins. Room -> rooms whose headers it may include (itself always).
ROOMS: dict[str, set[str]] = {
    "storage/base": set(),
    "storage": {"storage/base"},
    "storage/trace": {"storage/base"},
    "index": {"storage", "storage/base"},
    "proto": set(),
    "proto/rpc": {"proto", "storage/base"},
    "proto/shm": {"storage/base"},
    "gpu/driver": {"storage/base"},
    "gpu": {
        "gpu/driver", "gpu/kernels", "gpu/resident/resident_layout.h", "index/backend", "index/segment.h",
        "storage", "storage/base",
    },
    "gpu/kernels": {"gpu/resident/resident_layout.h", "storage/base"},
    # What a region is, byte by byte: both sides of it see no more of each other.
    "gpu/resident/resident_layout.h": {"gpu/kernels"},
    "gpu/wavebufferd": {"gpu", "gpu/driver", "proto", "proto/rpc", "storage", "storage/base"},
    "daemon/engine": {
        "index", "index/backend", "index/segment.h", "index/token_sketch.h", "storage", "storage/base",
        "storage/trace",
    },
    "daemon/dataplane": {"proto/shm", "daemon/engine", "storage", "storage/base"},
    "daemon/server": {
        "proto", "proto/rpc", "proto/shm", "daemon/dataplane", "daemon/engine", "storage/base",
        "storage/trace",
    },
    "daemon/main.cc": {
        "daemon/server", "daemon/engine", "gpu", "index", "index/backend", "storage",
        "storage/base", "proto/rpc",
    },
    "client": {"client/gpu", "proto", "proto/rpc", "proto/shm", "storage/base"},
    "client/gpu": {"gpu/driver", "gpu/kernels", "gpu/resident/resident_layout.h", "storage/base"},
    "client/cli": {"client", "proto/rpc", "storage/base", "storage/trace"},
    "tests": {"*"},
    "bench": {"*"},
}
# Part of index, named on its own because gpu may see it and no more of index.
ROOMS["index/backend"] = ROOMS["index"] | {"index", "index/segment.h"}
ROOMS["index/token_sketch.h"] = ROOMS["index"]
ROOMS["index/segment.h"] = ROOMS["index"] | {"index/token_sketch.h"}
ROOMS["index"] |= {"index/backend", "index/segment.h", "index/token_sketch.h"}

# Third-party headers and the only rooms (or files) that may see them.
THIRD_PARTY = {
    r"faiss/": {"bench"},
    r"omp\.h": {"bench"},
    r"hwy/": {"index/simd"},
    r"(grpc|grpcpp|grpc\+\+)/": {"proto/rpc", "daemon/server", "daemon/main.cc", "client", "gpu/wavebufferd", "tests"},
    r"google/protobuf/": {"proto/rpc", "daemon/server", "client", "gpu/wavebufferd", "tests"},
    r"prometheus/": {"daemon/server"},
    r"CLI/": {"client/cli", "tests/mock_decoder", "bench"},
    r"nlohmann/": {"client/cli", "tests", "bench"},
    r"pybind11/": {"client/python"},
    r"cuda": {"gpu", "client/gpu", "tests/gpu", "bench/gpu"},
    r"absl/log/|absl/synchronization/": set(),
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def room_of(path: str) -> str:
    """Returns the longest room that holds `path`, a path relative to the root."""
    matches = [room for room in ROOMS if path == room or path.startswith(room + "/")]
    return max(matches, key=len, default="")


def sources() -> list[pathlib.Path]:
    return [
        path
        for top in ("storage", "index", "proto", "gpu", "daemon", "client", "tests", "bench")
        for path in sorted((ROOT / top).rglob("*"))
        if path.suffix in SOURCES and "build" not in path.relative_to(ROOT).parts
    ]


def violations(path: str, text: str) -> list[str]:
    """Returns the forbidden includes of one file as messages."""
    found = []
    room = room_of(path)
    if not room:
        return [f"{path}: lies in no room"]
    for quote, header in INCLUDE.findall(text):
        target = "proto" if header.startswith("wavekv/v1/") else room_of(header)
        if quote == '"' and target:
            allowed = ROOMS[room]
            if target != room and "*" not in allowed and target not in allowed:
                found.append(f"{path}: room {room} may not include {header} (room {target})")
            continue
        for pattern, places in THIRD_PARTY.items():
            if re.match(pattern, header) and not any(
                path == place or path.startswith(place + "/") for place in places
            ):
                found.append(f"{path}: {header} may be included in {sorted(places)} only")
    return found


def test_every_include_is_allowed():
    files = sources()
    assert len(files) > 10, "the tree was not found"
    found = [
        message
        for path in files
        for message in violations(str(path.relative_to(ROOT)), path.read_text())
    ]
    assert not found, "\n".join(found)


def test_no_room_sees_tests_or_bench():
    for path in sources():
        relative = str(path.relative_to(ROOT))
        if relative.startswith(("tests/", "bench/")):
            continue
        for _, header in INCLUDE.findall(path.read_text()):
            assert not header.startswith(("tests/", "bench/")), f"{relative} includes {header}"


def test_the_guard_sees_forbidden_arrows():
    # Each row: a file, an include, why it must be refused.
    rows = [
        ("storage/base/x.h", '#include "storage/block_pool.h"', "base sees no other room"),
        ("storage/x.h", '#include "index/segment.h"', "storage lies below index"),
        ("index/x.h", '#include "gpu/buffer_stager.h"', "index lies below gpu"),
        ("client/gpu/x.h", '#include "gpu/resident/resident_region.h"', "that is the daemon's side"),
        ("gpu/kernels/x.h", '#include "gpu/tenant_buffer.h"', "kernels see layouts only"),
        ("daemon/engine/x.cc", "#include <grpcpp/grpcpp.h>", "the engine embeds without gRPC"),
        ("daemon/engine/x.cc", '#include "wavekv/v1/types.pb.h"', "no wire format in the engine"),
        ("daemon/server/x.cc", '#include "index/zone/zone_plan.h"', "no index internals"),
        ("client/x.cc", '#include "daemon/engine/engine.h"', "the client is another process"),
        ("client/x.cc", '#include "storage/trace/trace_reader.h"', "only the command has files"),
        ("client/cli/x.cc", '#include "storage/block_pool.h"', "traces are all it sees of storage"),
        ("storage/trace/x.cc", '#include "storage/block_pool.h"', "a file format by itself"),
        ("proto/shm/x.h", '#include "wavekv/v1/types.pb.h"', "the channel has no protobuf"),
        ("daemon/dataplane/x.cc", "#include <grpcpp/grpcpp.h>", "the data plane runs without gRPC"),
        ("daemon/dataplane/x.cc", '#include "proto/rpc/metadata.h"', "that is gRPC's side"),
        ("gpu/x.cc", '#include "index/zone/zone_plan.h"', "gpu sees the waist only"),
        ("gpu/x.cc", "#include <grpcpp/grpcpp.h>", "of gpu only wavebufferd speaks a protocol"),
        ("index/zone/x.cc", "#include <faiss/IndexFlat.h>", "FAISS is oracle and baseline only"),
        ("storage/x.cc", '#include "absl/synchronization/mutex.h"', "invisible to TSan"),
    ]
    for path, include, why in rows:
        assert violations(path, include + "\n"), f"{path} with {include} must be refused: {why}"
