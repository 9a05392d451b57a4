"""Write the names of the HTTP API that the client uses: `python -m tools.client_vocabulary`."""

from pathlib import Path

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoints import BATCH_ENDPOINTS, BATCH_URLS
from jobs.protocol.idempotency import HEADER
from jobs.protocol.parameters import FILE_COLUMNS, UNSUPPORTED
from jobs.protocol.pooling_parameters import EMBEDDINGS
from jobs.protocol.states import STATES

VOCABULARY = Path(__file__).parents[1] / "batch_inference_pipeline" / "vocabulary.py"


def main() -> None:
    """Write the module."""
    VOCABULARY.write_text(vocabulary())


def vocabulary() -> str:
    """Return the source of the module, as the formatter leaves it."""
    prompts = "".join(f'    "{name}": "{BATCH_ENDPOINTS[url].prompt_field}",\n' for name, url in BATCH_URLS.items())
    ends = "".join(f'    "{state}",\n' for state, rule in STATES.items() if rule.final)
    parameters = "".join(f'    "{name}",\n' for name in (*FILE_COLUMNS, *UNSUPPORTED))
    return f'''"""Names of the HTTP API. `make docs` writes this file from the server's declarations."""

CHAT = "{CHAT}"
COMPLETIONS = "{COMPLETIONS}"
EMBEDDINGS = "{EMBEDDINGS}"
IDEMPOTENCY_HEADER = "{HEADER}"

PROMPT_FIELDS = {{
{prompts}}}
"""The endpoints of batches, with aliases, and the prompt parameter of each."""

END_STATES = (
{ends})
"""The states of a batch that has ended."""

PARAMETERS = (
{parameters})
"""The other parameters of bodies for text generation."""
'''


if __name__ == "__main__":
    main()
