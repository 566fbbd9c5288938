//! One gradient exchange under a strategy: every rank ends with the same mean gradient, bit for bit.
//!
//! That holds because each value is summed on one rank (ring, tree) or in one order (allgather: by rank) and
//! copied from there, and because every rank divides alike.

use super::exchange::{Buffer, ExchangeError, Exchanger, Kind};
use super::mesh::MeshError;
use flexcomm_compression::Energy;
use flexcomm_compression::codec::Element;
use flexcomm_compression::pipeline::{Member, Step};
use flexcomm_domain::{Rank, Strategy};
use flexcomm_exchange::{Bucket, Host, How, Leader, Param, Ran, Round, Status, head};
use flexcomm_trainer::{ANSWER_BYTES, Answer, Costs, Tick, Verdict};
use std::time::Instant;

/// The whole gradient's: a plan's strategies for further buckets are for none.
pub const BUCKET: usize = 0;

/// Of an exchange that the ranks refuse: of what is not finite nothing is kept.
const LOST: Energy = Energy { sent: 0.0, compensated: f64::INFINITY };

/// A gradient that could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// Between ranks.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// On this rank, or in all ranks' messages.
    #[error(transparent)]
    Bucket(#[from] flexcomm_exchange::ExchangeError),
    /// NaN or infinity, the same on all ranks.
    #[error("exchange a gradient with NaN or infinite values, {whose}: training has diverged (try a smaller --lr)")]
    NotFinite {
        /// Which ranks'.
        whose: String,
    },
    /// A rank has no part in the exchange, the same on all ranks.
    #[error("exchange the gradient: rank {rank} could not do its part: {why}")]
    Failed {
        /// The first that has none.
        rank: Rank,
        /// As it says.
        why: String,
    },
    /// A rank's status cannot be read.
    #[error("read the status of rank {0} in an exchange that was refused")]
    Status(Rank),
}

/// A rank's compressor and its connections: the whole gradient is one bucket.
pub struct Synchronizer {
    exchanger: Exchanger,
    bucket: Bucket,
    learning_rate: f64,
    buffer: Vec<u8>,
}

impl Synchronizer {
    /// With no residual.
    pub fn new(
        exchanger: Exchanger,
        params: Vec<Param>,
        seed: u64,
        learning_rate: f64,
    ) -> Result<Self, flexcomm_exchange::ExchangeError> {
        let (rank, world) = (exchanger.mesh().rank().0, exchanger.mesh().world() as u32);
        let bucket = Bucket::new(BUCKET as u32, params, Member { rank, world, ..Member::alone(seed) }, None)?;
        Ok(Self { exchanger, bucket, learning_rate, buffer: Vec::new() })
    }

    /// The connections.
    pub fn exchanger(&mut self) -> &mut Exchanger {
        &mut self.exchanger
    }

    /// The gradient's bucket.
    pub fn bucket(&mut self) -> &mut Bucket {
        &mut self.bucket
    }

    fn world(&self) -> usize {
        self.exchanger.mesh().world()
    }

    fn rank(&self) -> Rank {
        self.exchanger.mesh().rank()
    }

    /// Replaces `mean` by the mean of all ranks' compensated (and compressed) gradients. `check` stands for what must be alike on
    /// all ranks. Its costs are those of the exchange alone; one that the ranks refuse has them, too.
    pub fn run(
        &mut self,
        check: u32,
        tick: &Tick,
        gradient: &[f32],
        mean: &mut [f32],
    ) -> (Costs, Result<(), SyncError>) {
        // A trial's first step copies the pipeline, which is no part of a candidate's time.
        let prepared = self.prepare(tick);
        let started = Instant::now();
        let bytes = self.exchanger.mesh().bytes_sent();
        self.exchanger.begin_step(check);
        let ran = prepared.and_then(|()| match tick.strategy(BUCKET).is_dense() && !self.bucket.has_residual() {
            true => self.dense(tick.strategy(BUCKET), gradient, mean),
            false => self.compressed(check, tick, gradient, mean),
        });
        let sync = self.exchanger.sync_time();
        let costs = Costs {
            comp: started.elapsed().saturating_sub(sync),
            sync,
            wait: self.exchanger.wait_time(),
            bytes: self.exchanger.mesh().bytes_sent() - bytes,
            energy: ran.as_ref().copied().unwrap_or(LOST),
            ..Costs::default()
        };
        (costs, ran.map(|_| ()))
    }

    fn prepare(&mut self, tick: &Tick) -> Result<(), SyncError> {
        self.bucket.in_trial(tick.trial.is_some())?;
        Ok(self.bucket.prepare(tick.strategy(BUCKET).spec(), None)?)
    }

    /// A value that is not finite says that its rank has no part, and leaves none that is finite in the sum.
    fn dense(&mut self, strategy: &Strategy, gradient: &[f32], mean: &mut [f32]) -> Result<Energy, SyncError> {
        let finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
        let own = if finite(gradient) { Verdict::GoOn } else { Verdict::Diverged };
        self.buffer.resize(4 * gradient.len(), 0);
        let bytes = self.buffer.as_chunks_mut::<4>().0;
        bytes.iter_mut().zip(gradient).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
        let buffer = Buffer { bytes: &mut self.buffer, element: Some(Element::F32) };
        self.exchanger.run(Kind::Sum(strategy.collective()), buffer)?;
        let (sums, world) = (self.buffer.as_chunks::<4>().0, self.world() as f32);
        mean.iter_mut().zip(sums).for_each(|(mean, sum)| *mean = f32::from_le_bytes(*sum) / world);
        if !finite(mean) {
            return Err(self.refusal(&Answer::of(own)));
        }
        Ok(Energy::default())
    }

    fn compressed(&mut self, check: u32, tick: &Tick, gradient: &[f32], mean: &mut [f32]) -> Result<Energy, SyncError> {
        let step = Step { index: tick.index(), learning_rate: self.learning_rate };
        let leader = |selection| Leader::of(selection, tick.index(), self.world() as u32);
        let strategy = tick.strategy(BUCKET);
        let Ok(mut round) = self.bucket.begin(&Host, gradient, step, strategy.selection().map(leader));
        loop {
            self.carry(check, strategy, round)?;
            let split = round.split(check, self.exchanger.mesh().world(), &self.buffer);
            let differs = |rank| MeshError::Desynchronised { peer: Rank(rank as u32) };
            let arrived = split.map_err(|rank| ExchangeError::from(differs(rank)))?;
            if !round.last {
                round = self.bucket.next(&Host, &arrived)?;
                continue;
            }
            let ran = self.bucket.finish(&Host, &arrived, mean)?;
            return if ran == Ran::Good { Ok(self.bucket.energy()) } else { Err(self.refusal(&self.own_status())) };
        }
    }

    /// This rank's part in the exchange that was refused.
    fn own_status(&self) -> Answer {
        match self.bucket.status() {
            Status::Ready => Answer::of(Verdict::GoOn),
            Status::NotFinite | Status::Overflowed => Answer::of(Verdict::Diverged),
            Status::Failed => Answer::cannot(self.bucket.fault()),
        }
    }

    /// Why the exchange was refused: what all ranks say of their parts, so that all of them name the same ones.
    fn refusal(&mut self, own: &Answer) -> SyncError {
        self.statuses(own).map_or_else(|error| error, |all| refused(&all))
    }

    fn statuses(&mut self, own: &Answer) -> Result<Vec<Answer>, SyncError> {
        let mut all = vec![0; self.world() * ANSWER_BYTES];
        all[self.rank().index() * ANSWER_BYTES..][..ANSWER_BYTES].copy_from_slice(&own.encode());
        self.exchanger.run(Kind::Gather, Buffer { bytes: &mut all, element: None })?;
        let read = |(rank, bytes)| Answer::decode(bytes).ok_or(SyncError::Status(Rank(rank)));
        (0..).zip(all.chunks_exact(ANSWER_BYTES)).map(read).collect()
    }

    /// Runs the collective of a round; what it brings is in `self.buffer`.
    fn carry(&mut self, check: u32, strategy: &Strategy, round: Round) -> Result<(), SyncError> {
        let (world, rank, block) = (self.world(), self.rank().index(), round.head_bytes() + round.bytes);
        let Self { exchanger, bucket, buffer, .. } = self;
        buffer.clear();
        buffer.resize(if round.how == How::Gather { world * block } else { block }, 0);
        match round.how {
            How::Refused => {}
            How::Gather => {
                let (front, payload) = buffer[rank * block..][..block].split_at_mut(round.head_bytes());
                bucket.write(payload);
                front.copy_from_slice(&head(check, bucket.status())[..front.len()]);
                exchanger.run(Kind::Gather, Buffer { bytes: buffer, element: None })?;
            }
            How::Broadcast(root) => {
                bucket.write(buffer);
                exchanger.run(Kind::Broadcast(Rank(root)), Buffer { bytes: buffer, element: None })?;
            }
            How::Sum(element) => {
                bucket.write(buffer);
                let buffer = Buffer { bytes: buffer, element: Some(element) };
                exchanger.run(Kind::Sum(strategy.collective()), buffer)?;
            }
        }
        Ok(())
    }
}

/// Of all ranks' statuses: a codec that failed counts before gradients that are not finite.
fn refused(all: &[Answer]) -> SyncError {
    let of = |verdict| (0..).map(Rank).zip(all).filter(move |(_, answer)| answer.verdict == verdict);
    if let Some((rank, answer)) = of(Verdict::Cannot).next() {
        return SyncError::Failed { rank, why: answer.why.clone() };
    }
    let ranks: Vec<String> = of(Verdict::Diverged).map(|(rank, _)| rank.to_string()).collect();
    let whose = match ranks.is_empty() {
        true => "in the sum over the ranks".into(),
        false => format!("those of rank {}", ranks.join(", ")),
    };
    SyncError::NotFinite { whose }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_that_diverged_are_named_and_a_codec_that_failed_before_them() {
        let whole = || Answer::of(Verdict::GoOn);
        let diverged = || Answer::of(Verdict::Diverged);
        let failed = Answer::cannot("compress a gradient of 4 values: it has 3");
        for (answers, expected) in [
            (vec![whole(), diverged(), whole(), diverged()], "infinite values, those of rank 1, 3: training has"),
            (vec![whole(), whole()], "infinite values, in the sum over the ranks: training has"),
            (
                vec![diverged(), whole(), failed],
                "rank 2 could not do its part: compress a gradient of 4 values: it has 3",
            ),
        ] {
            let text = refused(&answers).to_string();
            assert!(text.contains(expected), "{text}");
        }
    }
}
