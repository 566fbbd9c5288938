//! AR-Topk (Tyagi and Swany 2023, algorithm 1): one rank's top-k indices go to all ranks, then everybody's values there add up
//! in flight. Every rank chooses or feeds, then takes at the indices that are agreed; [`crate::scatter`] of the sum is the
//! gradient.

use super::{Bucket, Gradient, Layers};
use crate::indices::{self, At, gather};
use crate::select::Selected;
use crate::{Device, LaunchError, topk};

impl Bucket {
    /// Error feedback and this rank's k largest, to lists of the caller: for ranks that lead, or that bid with the energy of their
    /// selection (in the outcome). Nothing counts as sent.
    pub fn choose(
        &mut self,
        device: &impl Device,
        gradient: Gradient,
        (k, to): (u64, &Selected),
    ) -> Result<(), LaunchError> {
        let feed = self.feed(&gradient);
        self.open = None;
        topk(device, &feed, (k, to), self.room.workspace)?;
        let at = At { k, indices: to.indices.part(0, 4 * k), values: to.values.part(0, 4 * k) };
        indices::put(device, &feed, &at, self.room.workspace)?;
        self.open = Some(feed);
        Ok(())
    }

    /// Error feedback alone: for ranks whose own selection nobody needs.
    pub fn feed_alone(&mut self, device: &impl Device, gradient: Gradient) -> Result<(), LaunchError> {
        let feed = self.feed(&gradient);
        self.open = None;
        indices::feed(device, &feed, self.room.workspace)?;
        self.open = Some(feed);
        Ok(())
    }

    /// Takes the values at indices that all ranks agreed on out of what [`Self::choose`] or [`Self::feed_alone`] compensated: they count as
    /// sent, unless [`Self::put_back`] follows. Zeros of a gradient that was refused.
    pub fn take_at(&mut self, device: &impl Device, at: &At) -> Result<(), LaunchError> {
        let feed = self.open.take().ok_or(LaunchError::Order("gather"))?;
        gather(device, &feed, (at, 1.0), self.room.workspace)?;
        self.memory.swap(0, 1);
        Ok(())
    }
}

/// Of a bucket that is compressed as one layer, in lists of its own.
impl Layers {
    /// As [`Bucket::choose`] of `k` values, or as [`Bucket::feed_alone`] without; the outcome lies where that of a step does.
    pub fn choose(&mut self, device: &impl Device, gradient: Gradient, k: Option<u64>) -> Result<(), LaunchError> {
        let mut bucket = self.only()?;
        match k {
            Some(k) => {
                let At { indices, values, .. } = self.lists(k)?;
                bucket.choose(device, gradient, (k, &Selected { indices, values, room: k }))?;
            }
            None => bucket.feed_alone(device, gradient)?,
        }
        device.copy(self.outcomes().part(0, crate::OUTCOME_BYTES), bucket.outcome())?;
        self.open = bucket.open;
        Ok(())
    }

    /// As [`Bucket::take_at`], of [`Self::lists`], whose indices the caller has filled. [`Self::put_back`] takes it back.
    pub fn take_at(&mut self, device: &impl Device, k: u64) -> Result<(), LaunchError> {
        let mut bucket = Bucket { open: self.open.take(), ..self.only()? };
        bucket.take_at(device, &self.lists(k)?)?;
        device.copy(self.outcomes().part(0, crate::OUTCOME_BYTES), bucket.outcome())?;
        self.put_back();
        Ok(())
    }
}
