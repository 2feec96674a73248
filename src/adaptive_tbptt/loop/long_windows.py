"""Long windows beside the usual ones, once the training loss has stalled.

Windows of a few steps learn fastest while they show a direction. If what matters lies further back,
they show none: the loss stalls, and no measurement tells whether a longer window would help, since
its gradient is still small or hidden by noise. So half of the steps go to windows that reach far
back. If they help, the loss falls, at most twice as late as with long windows alone. If they do
not, the usual windows take twice as long at most.

Once begun, it goes on: the long windows may be what lets the loss fall.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LongWindows:
    """Says which windows are long: one after every `losses` steps of usual windows.

    Attributes:
        losses: steps of a long window, all with a loss; 0 for no long windows.
        begun: whether the training loss has stalled.
        owed: steps of usual windows that no step of a long one has followed yet.
    """

    losses: int
    begun: bool = False
    owed: int = 0

    def next_losses(self, usual: int) -> int:
        """Return the losses of the next window, given those of a usual one."""
        return max(self.losses, usual) if self.begun and self.owed >= self.losses else usual

    def note(self, steps: int, long: bool, stalled: bool) -> None:
        """Take note of a window that was trained on.

        Args:
            steps: its losses.
            long: whether it was a long one.
            stalled: whether the loss of usual windows has stopped falling.
        """
        if self.begun:
            # The end of the stream may cut a long window off; the rest is owed still.
            self.owed = max(self.owed - steps, 0) if long else self.owed + steps
        self.begun = self.begun or (stalled and self.losses > 0)
