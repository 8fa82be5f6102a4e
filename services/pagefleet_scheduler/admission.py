"""Which requests are taken in: bounds, deadlines, and those that go on with an earlier one."""

from heapq import heapify, heappop, heappush

from pagefleet.wire import Moved, Reason, Rejected, Submit, unpack_ints
from pagefleet_scheduler.departures import Departures, can_move
from pagefleet_scheduler.outbox import Outbox
from pagefleet_scheduler.placement import Placement
from pagefleet_scheduler.queue import Room
from pagefleet_scheduler.requests import Requests
from pagefleet_scheduler.sequence import Request

_DEADLINES_TO_SPARE = 1000
"""How many deadlines of requests that have ended may pile up before they are removed."""


class Admission:
    """Where requests come in, and where those go for which nobody waits any more."""

    def __init__(
        self,
        requests: Requests,
        placement: Placement,
        outbox: Outbox,
        room: Room,
        *,
        prioritized: bool,
    ) -> None:
        self.room = room
        self.prioritized = prioritized
        """Whether the priority that a request asks for counts."""
        self.moved = 0
        """Requests that went on at another gateway while they were open."""
        self.recalled = 0
        """Requests that went on with tokens that were kept."""
        self._requests = requests
        self._placement = placement
        self._outbox = outbox
        self._departures = Departures()
        self._arrivals = 0
        self._fresh: list[Request] = []
        """Requests that nobody took in before, and that may be too long for every worker."""
        self._deadlines: list[tuple[float, str]] = []

    def submit(self, gateway: bytes, submit: Submit, now: float) -> None:
        """Take a request in, or refuse it."""
        if self.has_moved(submit.request):
            self._outbox.send(gateway, Moved(submit.request))
            return
        known = self._requests.get(submit.request)
        if known is not None:
            if known.attempt >= submit.attempt:
                return
            self._requests.forget(known)
        if not submit.prompt or not submit.choices:
            refusal = (Reason.INVALID, "The prompt has no tokens.", "prompt")
            self._outbox.send(gateway, Rejected(submit.request, submit.attempt, *refusal))
            return
        request = self._request(gateway, submit, now)
        if submit.continues and self._continue(request, submit, now):
            return
        if submit.attempt > 1 or submit.continues:
            # It was taken in before, perhaps by another scheduler with other workers.
            self._requests.begin(request, submit.choices)
        elif self._placement.waiting.is_full_for(submit.tenant, self.room):
            self._outbox.reject(request, Reason.OVERLOADED, "Too many requests wait already.")
        else:
            self._requests.begin(request, submit.choices)
            self._fresh.append(request)

    def _request(self, gateway: bytes, submit: Submit, now: float) -> Request:
        self._arrivals += 1
        arrived = now - submit.age
        goes_on = any(choice.tokens for choice in submit.choices)
        request = Request(
            id=submit.request,
            attempt=submit.attempt,
            gateway=gateway,
            prompt=unpack_ints(submit.prompt),
            params=submit.params,
            salt=submit.salt,
            prediction=unpack_ints(submit.prediction),
            number=self._arrivals,
            arrived=arrived,
            priority=submit.priority if self.prioritized else 0,
            tenant=submit.tenant,
            weight=submit.weight,
            began=arrived if goes_on else None,
            window=submit.window,
            deadline=None if submit.left is None else now + submit.left,
        )
        if request.deadline is not None:
            self._expect(request.deadline, request.id)
        return request

    # --- streams that go on ---------------------------------------------------------------------

    def _continue(self, request: Request, submit: Submit, now: float) -> bool:
        """Go on with what there is of an earlier request; returns whether there is anything."""
        former = self._departures.latest(submit.continues)
        if former == request.id:
            return False
        self._departures.move(former, request.id, now)
        wanted = {choice.index for choice in submit.choices if not choice.finished}
        fresh = not any(choice.tokens for choice in submit.choices)
        if (going := self._requests.get(former)) is not None:
            self._outbox.send(going.gateway, Moved(former))
            if fresh and can_move(going, request, wanted):
                self._requests.hand_over(going, request, wanted)
                self.moved += 1
                return True
            self._requests.forget(going)
        known = self._departures.take(former, request) if fresh else []
        if not known:
            return False
        request.began = request.arrived
        self._requests.begin(request, submit.choices, known)
        self.recalled += 1
        return True

    def has_moved(self, id: str) -> bool:
        """Whether a request went on under another id, so that this one is over."""
        return self._departures.has_moved(id)

    def leave(self, request: Request, now: float) -> None:
        """Nobody waits for a request any more, unless its client comes back."""
        self._departures.keep(request, now)
        self._requests.forget(request)

    # --- time -----------------------------------------------------------------------------------

    def watch(self, now: float) -> None:
        """End requests whose deadline has passed, forget those that were left long ago, and refuse
        new ones that no worker can take.
        """
        self._departures.expire(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, id = heappop(self._deadlines)
            request = self._requests.get(id)
            if request is not None and request.deadline == deadline:
                self._requests.time_out(request)
        if not self._placement.gathering:
            fresh, self._fresh = self._fresh, []
            for request in filter(self.is_too_long, fresh):
                self.refuse_as_too_long(request)

    def _expect(self, deadline: float, id: str) -> None:
        """Remember a deadline; most requests end before theirs, and leave it behind for a while."""
        if len(self._deadlines) > 2 * len(self._requests) + _DEADLINES_TO_SPARE:
            self._deadlines = [each for each in self._deadlines if self._requests.get(each[1])]
            heapify(self._deadlines)
        heappush(self._deadlines, (deadline, id))

    # --- what nobody can take -------------------------------------------------------------------

    def is_too_long(self, request: Request) -> bool:
        """Whether a request goes on, and there are workers, but none that can hold it, nor one that
        could and may come back.
        """
        placement = self._placement
        fits_nowhere = bool(request.sequences) and placement.fits_nowhere(request)
        return fits_nowhere and not placement.misses_one_for(request)

    def refuse_as_too_long(self, request: Request) -> None:
        """Refuse a request that is too long."""
        beams = f"{width} beams of " if (width := request.params.beam_width) else ""
        text = (
            f"The tokens of {beams}the prompt, {len(request.prompt)}, and those to generate, "
            f"{request.params.max_tokens}, are more than a worker can hold; the longest sequence "
            f"that one can hold has {self._placement.longest}."
        )
        fault = "max_tokens" if request.params.max_tokens else None
        self._requests.refuse(request, Reason.TOO_LONG, text, fault)

    def check(self) -> None:
        """Assert the invariants."""
        self._departures.check()
