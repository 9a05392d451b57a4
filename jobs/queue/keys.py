"""The name of every key in Redis.

All keys of the request path share the hash tag {q}, so that scripts may access any of them.
"""

SCHEMA_VERSION = "3"

SCHEMA = "{q}:schema"
FENCE = "{q}:fence"  # counter; each claim of a request takes the next number
LEASES = "{q}:leases"  # zset: request key -> deadline, ms of Redis TIME
LEASE = "{q}:lease"  # hash: request key -> "<fence> <attempt> <worker> <model>"
# Hash: request key -> "<attempts> <deaths> <engine_crashes>", once it was released unfinished
TRIES = "{q}:tries"
# Zset: request key or batch id -> until when a client reads its tokens, ms of Redis TIME
WATCHED = "{q}:watched"
TICK = "{q}:tick"  # hash: time, run_id, reap_after
# Hash: model -> since when its quarantined requests wait without a claim, ms of Redis TIME
QUARANTINE_WAITS = "{q}:quarantine_waits"
# Hash: generated, delivered (tokens), ended (requests), webhooks_<result>, since Redis was empty
TOTALS = "{q}:totals"
# Hash: state -> how many times a batch came to it from another one, since Redis was empty
ENTERED = "{q}:entered"
CREDIT = "{q}:credit"  # hash: model -> live requests claimed since batch lines last had their share
LIVE_CALLS = "{q}:live_calls"  # hash: request key -> "<bytes> <API process or -> <model>", of live_usage
RETAINED = "{q}:retained"  # zset: ended live call whose stream is retained -> when it ended, ms
RETAINED_BYTES = "{q}:retained_bytes"  # hash: retained live call -> bytes of its stream; "" -> the sum
KEY_USAGE = "{q}:key_usage"  # hash: "<API key's id> <name of a count>"
BATCHES = "{q}:batches"  # set of batch ids that have a record
ACTIVE = "{q}:active"  # set of batch ids that the control plane still has work on
ENDED = "{q}:ended"  # zset: recently ended batch -> when it was cleaned, ms of Redis TIME
WEIGHTS = "{q}:weights"  # hash: tenant -> its weight, if not 1
LIVE_WEIGHTS = "{q}:live_weights"  # hash: the same by the tenant's mark in ids of live calls
WAITING_BATCHES = "{q}:waiting_batches"  # zset: batch that no process has claimed -> since when, unix seconds
LEADER = "{q}:leader"  # token of the ticker in charge
FLEET_LEADER = "{q}:fleet_leader"  # token of the process that places workers on a Ray cluster
WORKERS = "{q}:workers"  # hash: worker -> WorkerRecord
ALIVE = "{q}:alive"  # zset: worker -> deadline, ms of Redis TIME
MODELS = "{q}:models"  # hash: model -> ModelRecord; outlives the workers
# Hash: model -> why its last worker could not load it, until one serves it, or for a day
LOAD_FAILURES = "{q}:load_failures"
# Since when worker records exist, or of the first query, after Redis was empty, ms of Redis TIME
REGISTRY_SINCE = "{q}:registry_since"
ON_DEMAND = "{q}:on_demand"  # hash: "<server> <model>" -> OnDemandModel; lasts as long as a server repeats it
# Zset: file id -> when the sweep checks it, unix seconds: its expiry, or a day after an upload
# began
FILE_EXPIRY = "{q}:file_expiry"
STORE = "{q}:store"  # id of the file store, as in its marker file
WRITTEN = "{q}:written"  # what `write_fault` writes; expires within seconds
QUEUE_ID = "{q}:id"  # id of this queue; a file store in a bucket names it as its owner

JOBS_CONTROL = "jobs"
"""The name under which the control plane reads its own control stream."""

PERMANENT = frozenset(
    {
        SCHEMA,
        FENCE,
        TICK,
        MODELS,
        REGISTRY_SINCE,
        LEADER,
        FLEET_LEADER,
        TOTALS,
        ENTERED,
        WEIGHTS,
        LIVE_WEIGHTS,
        ENDED,
        FILE_EXPIRY,
        STORE,
        QUEUE_ID,
        KEY_USAGE,
    }
)
"""The keys that remain in an idle queue."""


def batch(batch_id: str) -> str:
    """Hash: the fields of `batch_fields.BatchFields`; used_tokens / used_lines is the cost of a
    line.
    """
    return f"{{q}}:batch:{batch_id}"


def ready(batch_id: str, model: str) -> str:
    """List of line numbers that wait for a worker."""
    return f"{{q}}:ready:{batch_id}:{model}"


def bodies(batch_id: str) -> str:
    """Hash: line -> Request, from ingest to commit.

    A live call has line 0, its model, reply_to and API key, and since when it waits, ms of Redis
    TIME.
    """
    return f"{{q}}:body:{batch_id}"


def results(batch_id: str) -> str:
    """Hash: line -> Result, from commit until its part is registered."""
    return f"{{q}}:results:{batch_id}"


def answered(batch_id: str) -> str:
    """Stream of lines that got a result: l line numbers. Exists only while a client follows it."""
    return f"{{q}}:answered:{batch_id}"


def done(batch_id: str) -> str:
    """Bitmap of lines that have a result."""
    return f"{{q}}:done:{batch_id}"


def parts(batch_id: str) -> str:
    """Hash: name of a registered part -> number of its lines."""
    return f"{{q}}:parts:{batch_id}"


def live(model: str) -> str:
    """List of request keys of requeued live calls, which come before all other calls."""
    return f"{{q}}:live:{model}"


def live_tenants(model: str) -> str:
    """Zset: mark of a tenant with waiting live calls -> service received, in tokens by weight."""
    return f"{{q}}:live_tenants:{model}"


def live_of(model: str, tenant: str) -> str:
    """List of request keys of a tenant's live calls that wait for their turn."""
    return f"{{q}}:live_of:{model}\0{tenant}"


def live_usage(kind: str, name: str) -> str:
    """Hash: calls, bytes of the live calls of a "model" or a "tenant" that wait or run."""
    return f"{{q}}:live_usage:{kind}:{name}"


def quarantined(model: str) -> str:
    """Zset: request key -> number of its group.

    An engine core crashed with these in flight; a worker that runs nothing else claims a group.
    """
    return f"{{q}}:quarantined:{model}"


def tokens(key: str) -> str:
    """Stream of the deltas of one request.

    An entry's id is `<tokens of all choices so far>-<0 tokens | 1 accepted | 2 finished>`.
    """
    return f"{{q}}:tok:{key}"


def batch_tokens(batch_id: str) -> str:
    """Stream of the deltas of all requests of a batch; exists only while a client reads it.

    Fields: k request key, e id of the same entry in the request's own stream, p chunks ('' if too
    large to repeat here), s '1' completed | '0' failed | ''. An entry without k marks a change of
    state; with e 'discarded' it marks that the early lines and their entries were removed.
    """
    return f"{{q}}:batch_tok:{batch_id}"


def api(api_id: str) -> str:
    """Stream of entries that an API process has not read yet.

    Fields: k request key, e id of the entry in the request's own stream, and that entry's fields
    unless they are too large to repeat here.
    """
    return f"{{q}}:api:{api_id}"


def api_alive(api_id: str) -> str:
    """Exists while the API process waits for calls, and for a minute after its death."""
    return f"{{q}}:api_alive:{api_id}"


def driver(name: str) -> str:
    """Key that a process of the control plane renews; expires some seconds after its death."""
    return f"{{q}}:driver:{name}"


def driver_host(host: str) -> str:
    """Key that the processes of the control plane on `host` renew, with the same lifetime."""
    return f"{{q}}:driver_host:{host}"


def control(worker: str) -> str:
    """Stream of orders to one worker, or to the control plane (`JOBS_CONTROL`)."""
    return f"{{q}}:ctl:{worker}"


def claim(worker: str) -> str:
    """Hash: number of the worker's last claim, and the requests it returned."""
    return f"{{q}}:claim:{worker}"


def counted(worker: str) -> str:
    """Number of the worker's generated tokens that are counted in the totals."""
    return f"{{q}}:counted:{worker}"


def published(worker: str) -> str:
    """Number of the worker's publishes; lower than its answered ones if the server lost some."""
    return f"{{q}}:published:{worker}"


def gauges(worker: str) -> str:
    """WorkerGauges: the last report of a worker's engine and GPUs. Expires after some seconds."""
    return f"{{q}}:gauges:{worker}"


def held(worker: str) -> str:
    """Set of request keys that a worker holds leases on."""
    return f"{{q}}:held:{worker}"


def tenants(model: str) -> str:
    """Zset: tenant -> service received, in tokens by weight; the lowest is next."""
    return f"{{q}}:tenants:{model}"


def ring(model: str, tenant: str) -> str:
    """Zset: batch with waiting lines -> its rank.

    Urgent ones come first, by the end of their window, then priority classes, each by service
    received, in tokens (`common.lua`).
    """
    return f"{{q}}:ring:{model}\0{tenant}"  # model and tenant may contain colons


def level(ring: str) -> str:
    """Service received by the ring's last scheduled member, before its turn; no member is lower.

    Batches of a priority other than 0 are separate. Expires after some minutes.
    """
    return f"{{q}}:level:{ring}"


def served(ring: str, member: str) -> str:
    """Service received by a former member of a ring (`tenants`, `ring`).

    Expires after some minutes, before the level does.
    """
    return f"{{q}}:served:{ring}\0{member}"


def waiting(model: str) -> str:
    """Set of workers whose last claim left them room."""
    return f"{{q}}:waiting:{model}"


def loaders(model: str) -> str:
    """Set of servers that load the model when requests for it wait; expires with their offers."""
    return f"{{q}}:loaders:{model}"


def serving(model: str) -> str:
    """Set of workers registered for the model."""
    return f"{{q}}:serving:{model}"


def batch_models(batch_id: str) -> str:
    """Set of the models that the batch's lines name."""
    return f"{{q}}:batch_models:{batch_id}"


def files(tenant: str, purpose: str = "") -> str:
    """Zset, all of score 0: "<created, µs, 16 hex digits>:<file id>" of a tenant's listed files.

    Of one purpose, or of all.
    """
    return f"{{q}}:files:{tenant}\0{purpose}"


def file_place(file_id: str) -> str:
    """The member of `files` that a deleted result file had, for pages that continue after it.

    Expires after some hours.
    """
    return f"{{q}}:file_place:{file_id}"


def rate(key_id: str) -> str:
    """When an API key has all requests of a minute again, µs of Redis TIME, and the last one
    admitted.

    Expires at that time.
    """
    return f"{{q}}:rate:{key_id}"


def hold(folder: str) -> str:
    """Token of the process that works in a folder of a bucket. Expires some seconds later."""
    return f"{{q}}:hold:{folder}"


def open_batches(tenant: str) -> str:
    """Set of the tenant's batches that came through the API and have not ended."""
    return f"{{q}}:open_batches:{tenant}"


def batch_index(tenant: str) -> str:
    """Zset, all of score 0: ids of the tenant's batches that came through the API.

    Ids sort by time.
    """
    return f"{{q}}:batch_index:{tenant}"


def lua_table(names: set[str]) -> str:
    """Return Lua source of a table `key` with the given names of this module.

    Constants become strings, the rest functions.
    """
    lines = ["local key = {}"]
    for name in sorted(names):
        value = globals()[name]
        if isinstance(value, str):
            lines.append(f"key.{name} = '{value}'")
            continue
        arguments = ["a", "b"][: value.__code__.co_argcount]
        text = value(*(f"' .. {argument} .. '" for argument in arguments))
        lines.append(
            f"key.{name} = function({', '.join(arguments)}) return '{text}' end".replace(" .. ''", "").replace(
                "\0", "\\0"
            )
        )
    return "\n".join(lines)
