"""The configuration as frozen values: its keys, their defaults and bounds.

An attribute carries its unit in its name (`lease_ttl_s`); the YAML key reads as an operator
writes it (`lease_ttl: 30s`). Nothing here looks at the machine: a size may still be a share
(`25%`), and becomes bytes in `hicache.config.machine.resolve_sizes`. Each room gets only its own
piece (`config.tiers.disk`), never the whole.
"""

import math
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from hicache.config.fields import (
    Bytes,
    Deadline,
    FilePath,
    FlopRate,
    InShort,
    PolicyName,
    Rate,
    Seconds,
    TierSize,
    wrong,
)
from hicache.config.units import MIB, Share, format_size
from hicache.protocol.endpoint import (
    MAX_IPC_PATH_BYTES,
    default_endpoint,
    ipc_path,
    is_loopback,
    tcp_address,
)
from hicache.tiers.block import MAX_BLOCK_TOKENS
from hicache.tiers.catalog import kinds, near_kind, section_of
from hicache.tiers.tier import TierKind

Model = TypeVar("Model", bound=BaseModel)
ENDPOINT_FORM = "ipc:///absolute/path.sock, or tcp://host:port"
DEVICE_FORM = "auto, host, or cuda:N"


class Section(BaseModel):
    """A part of the configuration; never changes once made."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True
    )


class SocketConfig(Section):
    endpoint: str = Field(
        default_factory=lambda: default_endpoint({}, os.getuid()),
        description="Where the daemon listens.",
    )
    hwm: int = Field(
        default=1000, ge=1, description="Messages kept per peer before new ones are dropped."
    )
    busy_poll_s: Seconds = Field(
        default=0.0003,
        validation_alias="busy_poll",
        le=0.1,
        description="How long to poll without sleeping after a request. 0 saves some CPU time, "
        "and adds a wake-up to each request of a burst. At most 0.1 s.",
    )
    curve_secret_key_file: FilePath | None = Field(
        default=None, description="The daemon's CURVE key pair, for tcp:// beyond this machine."
    )
    curve_allowed_clients_dir: FilePath | None = Field(
        default=None, description="Folder of the public keys of the clients that may connect."
    )

    @field_validator("endpoint")
    @classmethod
    def _is_an_endpoint(cls, endpoint: str) -> str:
        return _checked_endpoint(endpoint)

    @property
    def has_keys(self) -> bool:
        return self.curve_secret_key_file is not None

    @model_validator(mode="after")
    def _is_private(self) -> Self:
        keys = (self.curve_secret_key_file, self.curve_allowed_clients_dir)
        address = tcp_address(self.endpoint)
        if any(keys) and (address is None or not all(keys)):
            raise wrong(
                "CURVE keys need a tcp:// endpoint, and both keys are needed",
                "curve_secret_key_file and curve_allowed_clients_dir together, or neither",
            )
        if address is not None and not is_loopback(address[0]) and not all(keys):
            raise wrong(
                f"{self.endpoint} can be reached from other machines, and anyone who reaches it "
                "could read cached prompts",
                "tcp://127.0.0.1:port, or curve_secret_key_file and curve_allowed_clients_dir",
            )
        return self


class EventsConfig(Section):
    endpoint: str | None = Field(
        default=None,
        description="Where KV events are published for routers; none: they are not. On tcp:// "
        "it uses the socket's CURVE keys, if there are any.",
    )
    hwm: int = Field(
        default=256,
        ge=1,
        description="Messages kept for a subscriber that does not read, at most 64 KiB each "
        "(256: 16 MiB). Further ones are dropped for it, and the gap shows in the "
        "sequence numbers.",
    )

    @field_validator("endpoint")
    @classmethod
    def _is_an_endpoint(cls, endpoint: str | None) -> str | None:
        return None if endpoint is None else _checked_endpoint(endpoint)


def _checked_endpoint(endpoint: str) -> str:
    path = ipc_path(endpoint)
    if path is None and tcp_address(endpoint) is None:
        raise wrong("this is not an endpoint", ENDPOINT_FORM)
    if path is not None and not path.startswith("/"):
        raise wrong("the socket's path must be absolute", ENDPOINT_FORM)
    if path is not None and len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise wrong("the socket's path is too long", f"at most {MAX_IPC_PATH_BYTES} bytes")
    return endpoint


class TierConfig(Section):
    """What every tier has."""

    size: TierSize = Field(description="Room for blocks, in bytes or as a share.")
    high_watermark: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="Eviction to the next tier starts when this share of the tier is used.",
    )
    low_watermark: float = Field(
        default=0.90, ge=0, lt=1, description="Eviction to the next tier stops at this share."
    )
    eviction: PolicyName = Field(
        default="lru",
        description="Which blocks are evicted first: the longest unused (lru), the least used "
        "(lfu), those not used again soon after they came (s3fifo), those cheap to "
        "recompute (gdsf), or those least likely to be used again (hazard). An "
        "installed package may offer more.",
    )

    @property
    def size_bytes(self) -> int:
        """Raises LookupError while the size is a share that `resolve_sizes` has not yet seen."""
        if isinstance(self.size, Share):
            raise LookupError(f"{self.size} is not yet resolved against the machine")
        return self.size

    @model_validator(mode="after")
    def _watermarks_in_order(self) -> Self:
        if self.low_watermark >= self.high_watermark:
            raise wrong(
                f"low_watermark {self.low_watermark} is not below "
                f"high_watermark {self.high_watermark}",
                "low_watermark less than high_watermark",
            )
        return self


class HbmConfig(TierConfig):
    # vLLM takes 92% of a GPU by default: on GPUs of 20 GiB and more, this and the worker's CUDA
    # context (0.6 GiB) fit into the rest.
    size: TierSize = Field(
        default=Share(0.05), description="Room for blocks, in bytes or as a share of the GPU."
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|host|cuda:\d+)$",
        description="GPU that holds the blocks; host: an emulation in host memory; auto: the "
        "first GPU found, else host.",
        json_schema_extra={"allowed": DEVICE_FORM},
    )
    page_kernels: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether CUDA kernels copy an inference engine's own pages, where that is "
        "faster: auto: only under MPS; always: also where the engine's kernels have "
        "to pause meanwhile; never.",
    )
    path: FilePath = Field(default="/dev/shm", description="Folder of the emulation's file.")


class DramConfig(TierConfig):
    path: FilePath = Field(default="/dev/shm", description="Folder of the arena that clients map.")
    huge_pages: bool = Field(default=False, description="Ask the kernel for huge pages.")
    pretouch: bool = Field(
        default=True,
        description="Touch every page at start, so that no request waits for the kernel to map it.",
    )


class VolumeTierConfig(TierConfig):
    """What a tier in a folder of a file system has: a size that is a share is one of its volume."""

    path: FilePath = Field(description="Folder of the blocks.")

    @property
    def volume_bytes(self) -> int:
        """What must be free on the volume at start."""
        return self.size_bytes


class DiskConfig(VolumeTierConfig):
    path: FilePath = Field(description="Folder of the blocks; one daemon at a time.")
    durability: Literal["fast", "batched", "sync"] = Field(
        default="batched",
        description="When a block is safe from power loss: whenever the operating system writes "
        "it (fast), once its batch is written (batched), or once it is written itself (sync).",
    )
    read_ahead: bool = Field(
        default=True,
        description="Let the kernel read ahead at a start, and for blocks below 32 KiB.",
    )
    batch_bytes: Bytes = Field(
        default=32 * MIB,
        validation_alias="batch",
        ge=MIB,
        description="Largest number of bytes in one commit.",
    )
    min_free_bytes: Bytes = Field(
        default=256 * MIB,
        validation_alias="min_free",
        ge=0,
        description="Bytes left free on the volume.",
    )

    write_budget_bytes_per_day: Rate | None = Field(
        default=None,
        validation_alias="write_budget",
        ge=1,
        description="Most bytes written to the disk per day by eviction; the blocks most likely "
        "to be used again are written first.",
    )
    min_return: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="A block evicted from memory is written to disk only if the probability "
        "that it is used again is at least this.",
    )

    @property
    def volume_bytes(self) -> int:
        return self.size_bytes + self.min_free_bytes

    @model_validator(mode="after")
    def _holds_its_batches(self) -> Self:
        if isinstance(self.size, int) and self.size < 4 * self.batch_bytes:
            raise wrong(
                f"size {format_size(self.size)} is less than four batches of "
                f"{format_size(self.batch_bytes)}, which LMDB needs to reuse freed room",
                "a larger size, or a smaller batch",
            )
        return self


class TiersConfig(Section):
    """A section for each kind of tier. `config_model` adds those of kinds registered elsewhere."""

    hbm: Annotated[HbmConfig | None, InShort(("auto",))] = Field(
        default=None, description="GPU memory, or its emulation."
    )
    dram: DramConfig = Field(description="Host memory shared with the clients.")
    disk: DiskConfig | None = Field(default=None, description="A local disk, kept across restarts.")

    @field_validator("hbm", mode="before")
    @classmethod
    def _all_defaults(cls, hbm: object) -> object:
        """`hbm: auto`, all of it as its defaults say."""
        return {} if hbm == "auto" else hbm

    def present(self) -> list[tuple[TierKind, TierConfig]]:
        """The kinds that are configured, fastest first, each with its section."""
        found = ((row, getattr(self, row.name, None)) for row in kinds())
        return [(row, section) for row, section in found if section is not None]


class PlannerConfig(Section):
    mode: Literal["measured", "always_reload", "always_recompute"] = Field(
        default="measured",
        description="How to decide between reload and recompute: by measured times, or always "
        "the same.",
    )
    prior_flop_rate: FlopRate | None = Field(
        default=None,
        description="FLOP/s of each GPU in a prefill, about half of its data sheet. With the "
        "model's shape, which the connector reports, it gives the first estimate of "
        "a prefill.",
    )
    prior_fixed_s: Seconds | None = Field(
        default=None,
        validation_alias="prior_fixed",
        description="First estimate of a prefill's fixed time.",
    )
    prior_per_token_s: Seconds | None = Field(
        default=None,
        validation_alias="prior_per_token",
        description="First estimate of a prefill's time per new token, for every model.",
    )
    prior_per_token_squared_s: Seconds | None = Field(
        default=None,
        validation_alias="prior_per_token_squared",
        description="First estimate of a prefill's time per pair of tokens that attend to each "
        "other.",
    )
    recompute_band: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="A reload that saves less than this share of the time is a tie: recompute.",
    )
    doubt_band: float = Field(
        default=0.10,
        ge=0,
        le=1,
        description="A reload that saves less than this share must save more than the "
        "estimates' uncertainty.",
    )
    exploration: float = Field(
        default=0.01,
        ge=0,
        le=0.5,
        description="Largest share of all time to first token that is spent on trying the other "
        "choice, to keep the measurements up to date.",
    )
    deadline_share: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="A load may take at most (1 + this) times its estimate, or min_deadline where "
        "that is longer; what has not arrived by then is recomputed (formula: docs/planner.md).",
    )
    min_deadline_s: Deadline = Field(
        default=0.1,
        validation_alias="min_deadline",
        description="No load is given up earlier than this.",
    )
    probe_links: bool = Field(default=True, description="Measure each tier's speed at start.")


class DeadlinesConfig(Section):
    fetch_s: Deadline = Field(
        default=5.0,
        validation_alias="fetch",
        description="Longest wait of a fetch for its blocks; its client may set a shorter one.",
    )
    put_s: Deadline = Field(
        default=5.0,
        validation_alias="put",
        description="Longest wait of a put for room, and of a durable commit for the disk; its "
        "client may set a shorter one.",
    )
    shutdown_s: Deadline = Field(
        default=30.0,
        validation_alias="shutdown",
        description="Longest time that a clean stop may take to write to disk what only memory "
        "holds. Ending the workers may take half of it again, and 2s at least.",
    )


class LimitsConfig(Section):
    max_message_bytes: Bytes = Field(
        default=64 * MIB,
        validation_alias="max_message",
        ge=64 * 1024,
        description="Largest message; a connection that sends a larger one is closed.",
    )
    max_unread_bytes: Bytes = Field(
        default=64 * MIB,
        validation_alias="max_unread",
        ge=64 * 1024,
        description="Bytes sent to a session that it has not read yet; more is sent as it reads.",
    )
    max_prompt_tokens: int = Field(
        default=2_000_000, ge=1, description="Longest prompt, in tokens."
    )
    max_sessions: int = Field(default=256, ge=1, description="Sessions at once.")
    min_available: TierSize | None = Field(
        default=Share(0.03),
        description="Memory that hicache leaves available, on the host and in each of its "
        "control groups; a share is of the host's or the group's memory. Below it, "
        "the dram tier gives memory back.",
    )
    max_leases: int = Field(default=65_536, ge=1, description="Leases at once.")
    max_leased: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Largest share of the unpinned memory that leases may hold; above it, "
        "matches are refused.",
    )
    max_pinned: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Largest share of each tier that pins may hold; further pins are refused.",
    )
    max_waiting: int = Field(
        default=4096,
        ge=1,
        description="Puts that may wait for room at once; further ones are refused.",
    )
    max_queued_moves: int = Field(
        default=16_384,
        ge=1,
        description="Block copies that may wait per link; further ones are refused.",
    )
    max_queued_bytes: Bytes = Field(
        default=256 * MIB,
        ge=1,
        description="Bytes that evictions, promotions, write-back and warm-ups may have waiting "
        "per link. More stays where it is until these are copied.",
    )
    lease_ttl_s: Deadline = Field(
        default=30.0,
        validation_alias="lease_ttl",
        description="A lease that is not renewed ends after this.",
    )
    session_ttl_s: Deadline = Field(
        default=30.0,
        validation_alias="session_ttl",
        description="A session without a request or heartbeat ends after this.",
    )
    max_namespaces: int = Field(
        default=4096,
        ge=1,
        description="Namespaces (models) that may have clients or blocks at once.",
    )


class LinkSpeeds(Section):
    """Bytes per second, by link."""

    hbm_to_dram: Bytes | None = Field(default=None, ge=1, description="From hbm.")
    dram_to_hbm: Bytes | None = Field(default=None, ge=1, description="To hbm.")
    disk_to_dram: Bytes | None = Field(default=None, ge=1, description="From disk.")
    dram_to_disk: Bytes | None = Field(default=None, ge=1, description="To disk.")


class LinkStalls(Section):
    """By link."""

    hbm_to_dram: bool = Field(default=False, description="Nothing arrives from hbm.")
    dram_to_hbm: bool = Field(default=False, description="Nothing arrives in hbm.")
    disk_to_dram: bool = Field(default=False, description="Nothing arrives from disk.")
    dram_to_disk: bool = Field(default=False, description="Nothing arrives on disk.")


class DebugConfig(Section):
    check: bool = Field(default=False, description="Check every invariant when idle (slow).")
    throttle_bytes_per_s: LinkSpeeds = Field(
        default=LinkSpeeds(),
        description="Largest copying speed in bytes per second, to imitate a slower device.",
    )
    stall: LinkStalls = Field(
        default=LinkStalls(), description="Links on which copies start and never end."
    )

    def bytes_per_s(self, link: str) -> float:
        """Of `disk_to_dram` or another link: infinity where nothing is said, 0 where it stalls."""
        if getattr(self.stall, link):
            return 0.0
        said = getattr(self.throttle_bytes_per_s, link)
        return math.inf if said is None else float(said)


class Config(Section):
    socket: SocketConfig = Field(default=SocketConfig(), description="How clients connect.")
    events: EventsConfig = Field(default=EventsConfig(), description="KV events, for routers.")
    block_tokens: int = Field(
        default=16, ge=1, le=MAX_BLOCK_TOKENS, description="Tokens per block."
    )
    tiers: TiersConfig = Field(description="Where blocks live, fastest first.")
    write_policy: Literal["write_back", "write_through", "write_through_selective"] = Field(
        default="write_back",
        description="When a block is written to persistent tiers: when memory evicts it, as soon "
        "as it is stored, or once it has been hit selective_hits times and not otherwise: blocks "
        "with fewer hits are dropped when memory evicts them and at a stop.",
    )
    selective_hits: int = Field(
        default=2, ge=1, description="Hits before write_through_selective writes."
    )
    planner: PlannerConfig = Field(default=PlannerConfig(), description="Reload or recompute.")
    deadlines: DeadlinesConfig = Field(default=DeadlinesConfig(), description="Longest waits.")
    limits: LimitsConfig = Field(
        default=LimitsConfig(), description="Limits; most refuse what is beyond them."
    )
    what_if: bool = Field(
        default=True,
        description="Keep a sample of the requests for `hicache stats --what-if`.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe messages that are logged."
    )
    debug: Annotated[DebugConfig, InShort((True, False))] = Field(
        default=DebugConfig(), description="For tests and demonstrations; `true` checks invariants."
    )

    @model_validator(mode="after")
    def _are_events_private(self) -> Self:
        endpoint = self.events.endpoint
        if endpoint is None:
            return self
        if endpoint == self.socket.endpoint:
            raise wrong("events.endpoint is where clients connect", "another endpoint")
        address = tcp_address(endpoint)
        if address is not None and not is_loopback(address[0]) and not self.socket.has_keys:
            raise wrong(
                f"{endpoint} can be reached from other machines, and anyone who reaches it could "
                "read the tokens of cached prompts",
                "tcp://127.0.0.1:port, or socket.curve_secret_key_file and "
                "socket.curve_allowed_clients_dir",
            )
        return self


def config_model() -> type[Config]:
    """`Config` with a section, and links to throttle, for every kind of tier in the catalogue."""
    return _with_sections(tuple(row for row in kinds() if row.name not in TiersConfig.model_fields))


@lru_cache
def _with_sections(rows: tuple[TierKind, ...]) -> type[Config]:
    if not rows:
        return Config
    near = near_kind().name
    sections: dict[str, Any] = {}
    speeds: dict[str, Any] = {}
    stalls: dict[str, Any] = {}
    for name, row in ((row.name, row) for row in rows):
        sections[name] = (section_of(row) | None, Field(default=None, description=row.summary))
        for link, way in ((f"{name}_to_{near}", "from"), (f"{near}_to_{name}", "to")):
            words = f"{way.title()} {name}."
            speeds[link] = (Bytes | None, Field(default=None, ge=1, description=words))
            words = f"Nothing arrives {'from' if way == 'from' else 'in'} {name}."
            stalls[link] = (bool, Field(default=False, description=words))
    speeds_model = _extended(LinkSpeeds, speeds)
    stalls_model = _extended(LinkStalls, stalls)
    debug_model = _extended(
        DebugConfig,
        {
            "throttle_bytes_per_s": _like(DebugConfig, "throttle_bytes_per_s", speeds_model),
            "stall": _like(DebugConfig, "stall", stalls_model),
        },
    )
    changed = {
        "tiers": _like(Config, "tiers", _extended(TiersConfig, sections)),
        "debug": _like(Config, "debug", debug_model),
    }
    return _extended(Config, changed)


def _extended(model: type[Model], fields: Mapping[str, Any]) -> type[Model]:
    """The model with these fields too, under its own name."""
    made: type[Model] = create_model(model.__name__, __base__=model, **fields)
    return made


def _like(model: type[BaseModel], name: str, section: type[BaseModel]) -> tuple[Any, Any]:
    """The model's field `name` as one that holds this section: same description, same default."""
    field = model.model_fields[name]
    default = ... if field.is_required() else section()
    kind = Annotated[section, *field.metadata] if field.metadata else section
    return kind, Field(default, description=field.description)
