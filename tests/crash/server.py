"""What the process does that those of the crash tests are forked from, so that none of them has to do it again.

It imports the flows, loads the compiled kernels and hashes the code. It opens no store: each fork opens its own.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import faiss
import yaml

import loading.query_log
from contracts.evidence import EvidencePlan
from flows.fingerprint import code_digest, lock_digest, package_versions
from stages.pipeline import numbered_stages
from tests.chain import resources_of, run_chain
from tests.corpora import make_corpus, make_queries
from tests.crash.inputs import PLAN
from tests.crash.process import Job

FORKED = Job  # what a fork works on, with all that it imports

faiss.omp_set_num_threads(1)  # OpenMP's threads do not live on in a fork
run_chain(
    make_queries([{"text": "refund policy"}, {"text": "w1"}]),
    resources_of(
        make_corpus([{"chunk_id": f"c-{n}", "text": f"refund policy {n % 7} w{n}"} for n in range(20)]),
        EvidencePlan.model_validate(yaml.safe_load(PLAN)),
    ),
)
for file in [loading.query_log.__file__, *(inspect.getsourcefile(stage.run) or "" for _, stage in numbered_stages())]:
    code_digest(Path(file).resolve())
lock_digest()
package_versions()
