# SPDX-License-Identifier: Apache-2.0
"""The engine core and the model runner around vLLM's scheduler, one iteration at a time.

Written after `EngineCore.step`, `EngineCore.step_with_batch_queue` and
`KVConnectorModelRunnerMixin._get_kv_connector_output` of vLLM 0.32, in the same order.
"""

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from fuzz.world.parts import Parts

_BATCHES = 2


@dataclass(slots=True)
class _Batch:
    """A step that was scheduled; its result is there once it was executed."""

    output: Any
    samples: set[str]
    result: ModelRunnerOutput | None = None


class Engine:
    """One engine: scheduler, worker half of the connector, model.

    Attributes:
        answers: tokens that were delivered, per request.
        ends: finish reason per request.
        late_aborts: requests to abort while the next batch is being computed.
    """

    def __init__(self, parts: Parts, scheduler: Any, worker: Any) -> None:
        self._parts = parts
        self.scheduler = scheduler
        self.worker = worker
        self.answers: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.late_aborts: list[str] = []
        self.batches: deque[_Batch] = deque()

    def iterate(self) -> None:
        """What the engine core's loop does once."""
        if self.scheduler.has_requests():
            batch = self._issue()
            if self._parts.setting.pipelined:
                executed = batch.output.total_num_scheduled_tokens > 0
                more = executed or self.scheduler.has_requests()
                if len(self.batches) < _BATCHES and more:
                    return
        if self.batches:
            self.collect()

    def drain(self) -> None:
        """Collect every batch that is in flight."""
        while self.batches:
            self.collect()

    @property
    def busy(self) -> bool:
        """Whether the loop goes on."""
        return bool(self.batches) or bool(self.scheduler.has_requests())

    def _issue(self) -> _Batch:
        output = self.scheduler.schedule()
        self._parts.counts["step"] += 1
        self._parts.counts["preempted"] += len(output.preempted_req_ids or ())
        requests = self.scheduler.requests
        samples = {
            req_id
            for req_id in output.num_scheduled_tokens
            if not requests[req_id].is_prefill_chunk
        }
        batch = _Batch(output, samples)
        self.batches.append(batch)
        if self._parts.eager > 0:
            self._parts.eager -= 1
            self._others_go_on()
        if not self._parts.setting.lagging:
            self.execute()
        return batch

    def _others_go_on(self) -> None:
        """Threads and streams do not wait for the engine's step."""
        for tier in self._parts.tiers:
            tier.end_all()
        for _ in range(self._parts.copies.waiting):
            self._parts.copies.run(0)
        self._parts.threads.run()

    def execute(self) -> bool:
        """The worker executes the oldest batch that it has not."""
        for batch in self.batches:
            if batch.result is None:
                batch.result = self._execute(batch.output, batch.samples)
                return True
        return False

    def collect(self) -> None:
        """Hand the oldest batch's result to the scheduler."""
        if self.batches[0].result is None:
            self.execute()
        batch = self.batches.popleft()
        aborts, self.late_aborts = self.late_aborts, []
        if aborts:
            self.scheduler.finish_requests(aborts, RequestStatus.FINISHED_ABORTED)
        outputs = self.scheduler.update_from_output(batch.output, batch.result)
        for output in outputs.values():
            for one in output.outputs:
                self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ends[one.request_id] = str(one.finish_reason)

    def _execute(self, output: Any, samples: set[str]) -> ModelRunnerOutput:
        worker, model = self.worker, self._parts.model
        worker.handle_preemptions(output.kv_connector_metadata)
        model.learn(output)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        work = output.total_num_scheduled_tokens > 0
        if output.has_sync_kv_loads:
            self._start_loads(work)
        if work:
            model.forward(output, self._parts.scripts)
        if not output.has_sync_kv_loads:
            self._start_loads(work)
        worker.wait_for_save()
        report = self._report(output)
        if not work:
            return ModelRunnerOutput.with_kv_conn_output_only(report)
        return self._sampled(output, samples, report)

    def _start_loads(self, work: bool) -> None:
        self.worker.start_load_kv(SimpleNamespace(attn_metadata={} if work else None))

    def _report(self, output: Any) -> KVConnectorOutput:
        worker = self.worker
        report = KVConnectorOutput()
        results = worker.get_transfer_results(output.finished_req_ids)
        report.finished_sending = results.finished_sending
        report.finished_recving = results.finished_recving
        report.failed_recving = results.failed_recving
        self._parts.counts["load_failed"] += len(results.failed_recving)
        report.invalid_block_ids = worker.get_block_ids_with_load_errors()
        report.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return report

    def _sampled(
        self, output: Any, samples: set[str], report: KVConnectorOutput
    ) -> ModelRunnerOutput:
        begins = self._parts.model.starts(output)
        req_ids = list(output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for req_id in req_ids:
            at = begins[req_id] + output.num_scheduled_tokens[req_id]
            tokens.append([self._parts.scripts[req_id].tokens[at]] if req_id in samples else [])
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=tokens,
            kv_connector_output=report,
        )
