//! AR-Topk (Tyagi and Swany 2023, algorithm 1): one rank's top-k indices go to all ranks, then everybody's values there add up
//! in flight. Every rank chooses, then takes its values at the agreed indices; [`crate::scatter`] of the sum is the gradient.

use super::{Gradient, Layers};
use crate::indices::{self, gather};
use crate::{Device, LaunchError, topk};

/// Of a bucket that is compressed as one layer, in lists of its own.
impl Layers {
    /// Error feedback and, given `k`, this rank's k largest, to [`Self::lists`]: for ranks that lead, or that bid with the energy of
    /// their selection (in the outcome). Nothing counts as sent.
    pub fn choose(&mut self, device: &impl Device, gradient: Gradient, k: Option<u64>) -> Result<(), LaunchError> {
        let (feedback, workspace) = (self.only()?.feedback(gradient), self.workspace());
        self.open = None;
        match k {
            Some(k) => {
                let at = self.lists(k)?;
                topk(device, &feedback, k, &at, workspace)?;
                indices::put(device, &feedback, &at, workspace)?;
            }
            None => indices::compensate(device, &feedback, workspace)?,
        }
        self.keep_outcome(device)?;
        self.open = Some(feedback);
        Ok(())
    }

    /// Takes the values at the first k indices of [`Self::lists`], on which all ranks have agreed, out of what [`Self::choose`]
    /// compensated: they count as sent, unless [`Self::put_back`] follows. Zeros of a gradient that was refused.
    pub fn take_at(&mut self, device: &impl Device, k: u64) -> Result<(), LaunchError> {
        let feedback = self.open.take().ok_or(LaunchError::Order("gather"))?;
        gather(device, &feedback, &self.lists(k)?, 1.0, self.workspace())?;
        self.keep_outcome(device)?;
        self.put_back();
        Ok(())
    }

    fn keep_outcome(&self, device: &impl Device) -> Result<(), LaunchError> {
        device.copy(self.only()?.outcome, self.room.outcome())
    }
}
