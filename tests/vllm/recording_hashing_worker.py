"""A worker for `vllm serve --worker-cls recording_hashing_worker.RecordingHashingWorker`, in a process of its own."""

from __future__ import annotations

import json
import os
from typing import Any

from hashing_worker import HashingWorker


class RecordingHashingWorker(HashingWorker):
    """`HashingWorker`, whose faults go to the file WATCHED_WORKER_RECORD."""

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        if self.faults:
            with open(os.environ["WATCHED_WORKER_RECORD"], "a") as record:
                record.write(json.dumps({"faults": self.faults}) + "\n")
            self.faults = []
        return output
