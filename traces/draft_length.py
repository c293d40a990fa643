"""How many tokens to draft next, from what drafting has brought and cost so far."""

from dataclasses import dataclass, field

LONGEST = 8  # where nobody says
FORGET = 0.95  # weight of what is known when one more observation comes
RECENT = 0.5  # weight of a mean that counts by itself
MARGIN = 1.05  # another length must promise this much more
WARM_UP = (4, 4, 0, 4, 0, 2)  # lengths of the first steps: something must be seen of each quantity
TRIAL_SOON, TRIAL_EVERY, TRIAL_RARELY = 4, 16, 256  # steps between trials of another length
TRIAL_AT_ZERO = 2


@dataclass(slots=True)
class Mean:
    """A mean that forgets: the last observation weighs 1, the one before `FORGET`, and so on."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.fade()
        self.total, self.weight = self.total + value, self.weight + 1.0

    def fade(self) -> None:
        self.total, self.weight = FORGET * self.total, FORGET * self.weight

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass(slots=True)
class LengthChooser:
    """Chooses the draft length K of every step so as to get the most tokens per second; 0 is plain decoding.

    A round of length K gives 1 + S_1 + ... + S_K tokens, where S_i is the share of rounds in which at least i drafts
    were kept (Leviathan et al. 2023, arXiv 2211.17192, section 3, without their assumption that positions are alike),
    and takes K times the time of one drafted token and the time of one step of K + 1 rows. All of these are measured
    as the text is written, in means that forget, so they follow the text, the policy's cache and the machine. A length
    that was not tried lately takes its step time from the line through those that were, and one that was never tried
    its S_i from the last ratio.

    The first steps try lengths 4, 0 and 2. After that the best length is kept until another promises 5 % more, so that
    noise does not make it flutter. From time to time one step tries a neighbour of it (2 tokens where it is 0), for
    otherwise nothing new would be learnt of what is not done: after 16 steps, after up to 256 while trials change
    nothing, and after 4 where a longer draft was kept whole. What a policy answers when it is asked for a draft length
    stays an upper bound.
    """

    longest: int = LONGEST
    length: int = WARM_UP[0]
    drafted_token: Mean = field(default_factory=Mean)
    steps: dict[int, Mean] = field(default_factory=dict)
    reached: list[Mean] = field(default_factory=list)  # [i]: whether at least i + 1 drafts were kept
    _seen: int = 0
    _next_trial: int = len(WARM_UP) + TRIAL_EVERY
    _interval: int = TRIAL_EVERY
    _up: bool = True

    def choose(self) -> int:
        """The length of the next step, 0 to `longest`."""
        if self._seen < len(WARM_UP):
            return min(WARM_UP[self._seen], self.longest)
        best = max(range(self.longest + 1), key=self.rate)
        if self.rate(best) > MARGIN * self.rate(self.length):
            self.length = best
            self._interval = TRIAL_EVERY
        if self._seen < self._next_trial:
            return self.length
        self._interval = min(2 * self._interval, TRIAL_RARELY)
        self._next_trial = self._seen + self._interval
        self._up = not self._up
        other = TRIAL_AT_ZERO if self.length == 0 else self.length + (1 if self._up else -1)
        return min(max(other, 0), self.longest)

    def learn(self, drafted: int, accepted: int, draft_s: float, step_s: float) -> None:
        """One round: tokens drafted and kept, seconds of drafting (text that had to be read first left out) and of the
        target's step."""
        self._seen += 1
        if drafted > self.length and accepted == drafted:
            self._interval, self._next_trial = TRIAL_EVERY, min(self._next_trial, self._seen + TRIAL_SOON)
        for length, mean in self.steps.items():
            if length != drafted:
                mean.fade()  # what has not been done for long weighs little
        self.steps.setdefault(drafted, Mean()).add(step_s)
        if drafted:
            self.drafted_token.add(draft_s / drafted)
        self.reached += [Mean() for _ in range(drafted - len(self.reached))]
        for position in range(drafted):
            self.reached[position].add(float(accepted > position))

    def rate(self, length: int) -> float:
        """Expected tokens per second at a draft length; 0 before any step was seen."""
        seconds = length * self.drafted_token.value + self.step_seconds(length)
        return self.tokens(length) / seconds if seconds > 0 else 0.0

    def tokens(self, length: int) -> float:
        """Expected tokens of one round."""
        shares = [mean.value for mean in self.reached[:length]]
        while len(shares) < length:
            last = shares[-1] if shares else 0.0
            shares.append(last * (last / shares[-2] if len(shares) > 1 and shares[-2] else last))
        return 1.0 + sum(shares)

    def step_seconds(self, length: int) -> float:
        """Expected time of the target's step with so many drafts: as measured lately, or from a line through that."""
        if length in self.steps and self.steps[length].weight >= RECENT:
            return self.steps[length].value
        points = [(k, mean.value, mean.weight) for k, mean in self.steps.items()]
        weight = sum(w for _, _, w in points)
        if not weight:
            return 0.0
        middle = sum(w * k for k, _, w in points) / weight
        mean = sum(w * t for _, t, w in points) / weight
        spread = sum(w * (k - middle) ** 2 for k, _, w in points)
        slope = sum(w * (k - middle) * (t - mean) for k, t, w in points) / spread if spread else 0.0
        return mean + max(0.0, slope) * (length - middle)
