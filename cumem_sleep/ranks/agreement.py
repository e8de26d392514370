"""All ranks or none: between the halves of a sleep, a wake or a discard, the ranks of an engine agree.

A round is one operation of all ranks. A rank that has done its first half votes; when it has heard the votes of all, or
of one that failed, or its time is up, it proposes an outcome, and the first proposal is the decision. Until it has read
that decision, a rank can still undo its half, and does nothing that could not be undone.

On one host the decision is in a record that belongs to no process (`ranks.decisions`), so that a rank may be stopped or
killed at any moment, and no two ranks ever read different decisions. Over several hosts rank 0 decides, after every
other rank has left that to it; a rank that then hears nothing undoes its half and says that it does not know.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from .. import _core
from ..core import log
from ..core.operation import Vote
from ..errors import CumemSleepError, InvalidState, RankFailed
from ..report import PhaseTimer
from .decisions import GO, Decision, Reason
from .mesh import Mesh, MessageKind, RankMessage

LOOK_S = 0.02  # between looks for a wish to stop
# For how long a rank that missed a round waits for the others to begin the next. As a rule nobody comes: its call is
# the one that the others gave up on.
LATE_S = 1.0
TEXT_S = 1.0  # for an error's text, which was sent before the decision that it led to


@dataclass
class _Heard:
    """What the other ranks said of one round."""

    operations: dict[int, str] = field(default_factory=dict)
    votes: dict[int, Decision] = field(default_factory=dict)
    yours: set[int] = field(default_factory=set)


class Agreement:
    """What one rank knows of the rounds."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self.mesh = mesh
        self.timeout_s = timeout_s
        self.round = 0  # the last one that this rank has begun, or missed
        self.missed = False  # the others have decided a round without this rank, just before its current one
        self.heard: defaultdict[int, _Heard] = defaultdict(_Heard)  # what is known of a round
        self.gave_back = False  # another rank has given back what all of them had made ahead
        self._told: dict[int, Decision] = {}  # where there is no record: what rank 0 said

    def listen(self, timeout_s: float) -> None:
        """Wait for messages, at most so long."""
        self.mesh.receive(timeout_s, self._take)

    def next_round(self) -> int:
        """The round of the operation that begins: the first that did not end because this rank was missing.

        A round that ended for another reason is this rank's as well: it only begins it later than the others.
        """
        self.listen(0)
        self.missed = False
        self.round += 1
        while decision := self.decision(self.round):
            was_missing = decision.failed == self.mesh.rank
            if not was_missing and decision.why is not Reason.LATE:  # that was a round of the late rank alone
                break
            self.missed |= was_missing
            self.round += 1
        later = {number: heard for number, heard in self.heard.items() if number >= self.round}
        self.heard = defaultdict(_Heard, later)
        self._told = {number: decision for number, decision in self._told.items() if number >= self.round}
        return self.round

    def decision(self, round_: int) -> Decision | None:
        """What was decided, as far as this rank can know without asking."""
        record = self.mesh.record
        if record is not None:
            return record.of(round_)
        if round_ in self._told:
            return self._told[round_]
        # A rank that gave up has not left the decision to rank 0, and will not.
        votes = self.heard[round_].votes
        return next((vote for vote in votes.values() if not vote.go), None)

    def decide(self, round_: int, wanted: Decision) -> Decision:
        """The decision: `wanted`, unless another rank was first."""
        if not wanted.go:  # before it is decided, because it says more
            self.mesh.send(RankMessage(MessageKind.VOTE, round_, decision=wanted))
        if self.mesh.record is not None:
            return self.mesh.record.decide(round_, wanted)
        if self.mesh.rank == 0:
            return self._decide_for_all(round_, wanted)
        return self._let_rank_0_decide(round_, wanted)

    def _decide_for_all(self, round_: int, wanted: Decision) -> Decision:
        others = set(range(1, self.mesh.size))
        heard, deadline = self.heard[round_], time.monotonic() + self.timeout_s
        while wanted.go and (missing := others - heard.yours):
            votes = (vote for vote in heard.votes.values() if not vote.go)
            if (no := next(votes, None)) is not None:
                wanted = no
            elif gone := missing & self.mesh.gone:
                wanted = Decision(min(gone), Reason.ENDED)
            elif time.monotonic() > deadline:
                wanted = Decision(min(missing), Reason.UNFINISHED)
            else:
                self.listen(LOOK_S)
        self._told[round_] = wanted
        self.mesh.send(RankMessage(MessageKind.DECIDED, round_, decision=wanted))
        return wanted

    def _let_rank_0_decide(self, round_: int, wanted: Decision) -> Decision:
        if not wanted.go:
            return wanted  # rank 0 waits for the word that this rank has not given
        self.mesh.send(RankMessage(MessageKind.YOURS, round_), 0)
        deadline = time.monotonic() + self.timeout_s
        while round_ not in self._told:
            if 0 in self.mesh.gone or time.monotonic() > deadline:
                return Decision(0, Reason.UNDECIDED)
            self.listen(LOOK_S)
        return self._told[round_]

    def tell_gave_back(self) -> None:
        """Tell the other ranks that this one has given back what all of them had made ahead."""
        self.mesh.send(RankMessage(MessageKind.GAVE_BACK, self.round))

    def _take(self, sender: int, message: RankMessage) -> None:
        if message.kind is MessageKind.GAVE_BACK:
            self.gave_back = True
            return
        heard = self.heard[message.round]
        if message.kind is MessageKind.BEGUN:
            heard.operations[sender] = message.operation
        elif message.kind is MessageKind.VOTE:
            heard.votes[sender] = message.decision
        elif message.kind is MessageKind.YOURS:
            heard.yours.add(sender)
        else:
            self._told[message.round] = message.decision


class RankVote(Vote):
    """One operation of one rank of several; `lock` is the allocator's."""

    def __init__(self, agreement: Agreement, operation: str, lock: _core.OperationLock) -> None:
        self._agreement = agreement
        self._mesh = agreement.mesh
        self._operation = operation
        self._lock = lock
        self._round = 0
        self._concluded = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or self._mesh.is_closed:  # nobody hears of it; and in a fork nobody may give the lock back
            return
        with suppress(InvalidState):  # called from inside another operation: the others wait in vain
            log.run(self._lock, partial(self.refuse, error), holding=True)

    def begin(self) -> None:
        """Tell the others that the operation begins.

        Raises:
            RankFailed: it does not, because they have decided it already, or a rank has ended.
            InvalidState: this rank has left the group since the call was made, or is a fork.
        """
        if self._mesh.is_closed:
            raise InvalidState(
                f"{self._operation}: this process has left the group of ranks that it was in when this was called, or"
                " is a fork of a rank"
            )
        self._round = self._agreement.next_round()
        self._mesh.send(RankMessage(MessageKind.BEGUN, self._round, self._operation))
        if (decision := self._agreement.decision(self._round)) is not None:
            self._conclude(decision)
        elif self._mesh.gone:
            self._conclude(Decision(min(self._mesh.gone), Reason.ENDED))

    def agree(self, timer: PhaseTimer) -> None:
        """See `Call.agree`."""
        with timer("agree"):
            self._mesh.send(RankMessage(MessageKind.VOTE, self._round))
            try:
                wanted = self._outcome_of_votes()
            except _core.OperationStopped:
                with suppress(RankFailed):
                    self._conclude(Decision(self._mesh.rank, Reason.INTERRUPTED))
                    return
                raise
            self._conclude(wanted)

    def refuse(self, error: BaseException) -> None:
        """See `Call.refuse`. The error is told to the others, and says which rank it was."""
        if self._concluded or self._mesh.is_closed:
            return
        if self._round == 0:  # what fails before it begins is in a round, too: the others wait for it
            self._round = self._agreement.next_round()
        is_error = isinstance(error, Exception)
        text = f"{type(error).__name__}: {error}" if is_error else ""
        refusal = Decision(self._mesh.rank, Reason.REFUSED if is_error else Reason.INTERRUPTED, text)
        self._agreement.decide(self._round, refusal)
        self._concluded = True
        if isinstance(error, CumemSleepError):
            error.rank = self._mesh.rank

    def _conclude(self, wanted: Decision) -> None:
        decision = self._agreement.decide(self._round, wanted)
        self._concluded = True
        if not decision.go:
            raise self._failure(decision)

    def _outcome_of_votes(self) -> Decision:
        agreement, rank = self._agreement, self._mesh.rank
        heard = agreement.heard[self._round]
        others = set(range(self._mesh.size)) - {rank}
        start = time.monotonic()
        while True:
            if (decision := agreement.decision(self._round)) is not None:
                return decision
            for number, vote in heard.votes.items():
                if not vote.go:
                    return vote
                if heard.operations.get(number, self._operation) != self._operation:
                    return Decision(number, Reason.OTHER_OPERATION, heard.operations[number])
            missing = others - set(heard.votes)
            if not missing:
                return GO
            if gone := missing & self._mesh.gone:
                return Decision(min(gone), Reason.ENDED)
            waited_s = time.monotonic() - start
            if agreement.missed and waited_s > min(LATE_S, agreement.timeout_s) and not heard.operations:
                return Decision(rank, Reason.LATE)
            if waited_s > agreement.timeout_s:
                silent = missing - set(heard.operations)
                return Decision(min(silent or missing), Reason.SILENT if silent else Reason.UNFINISHED)
            agreement.listen(min(LOOK_S, agreement.timeout_s))
            _core.stop_if_asked()

    def _failure(self, decision: Decision) -> RankFailed:
        text = decision.text or self._text_of(decision)
        return RankFailed(
            self._operation,
            decision.failed,
            self._mesh.size,
            _reason(decision.why, text, self._agreement.timeout_s),
            undecided=decision.why is Reason.UNDECIDED,
        )

    def _text_of(self, decision: Decision) -> str:
        """What the rank that failed said, before it was decided: the record has no text, and is faster."""
        votes = self._agreement.heard[self._round].votes
        ends_at = time.monotonic() + TEXT_S
        while True:
            self._agreement.listen(0)
            texts = [vote.text for vote in votes.values() if vote.failed == decision.failed and vote.text]
            if texts or decision.why is not Reason.REFUSED or time.monotonic() > ends_at:
                return texts[0] if texts else ""
            self._agreement.listen(LOOK_S)


def _reason(why: Reason, text: str, timeout_s: float) -> str:
    in_time = f"within {timeout_s:g} s (CUMEM_SLEEP_AGREEMENT_TIMEOUT_S)"
    return {
        Reason.REFUSED: f"failed: {text}" if text else "failed",
        Reason.INTERRUPTED: "was interrupted",
        Reason.ENDED: "has ended, or its connection is lost: restart the engine",
        Reason.UNFINISHED: f"was not ready {in_time}: it may be hung, or its copies may need a longer timeout",
        Reason.SILENT: f"did not begin {in_time}: it was not called, or is stopped",
        Reason.LATE: "was called when the others had given up on it",
        Reason.OTHER_OPERATION: f"was asked for something else ({text})",
        Reason.UNDECIDED: "had to decide but did not answer: it may have committed",
    }.get(why, why.name)
