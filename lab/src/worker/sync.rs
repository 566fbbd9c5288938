//! One gradient exchange under a strategy: every rank ends with the same mean gradient, bit for bit.
//!
//! That holds because each value is summed on one rank (ring, tree) or in one order (allgather: by rank) and
//! copied from there, and because every rank divides alike.

use super::exchange::{Blocks, Elements, ExchangeError, Exchanger, Kind, Values};
use flexcomm_collectives::GenerateError;
use flexcomm_compression::Energy;
use flexcomm_compression::pipeline::{Member, Step};
use flexcomm_domain::{Collective, Rank, Selection, Strategy};
use flexcomm_exchange::{Bucket, How, Leader, Param, Ran, Round, Status};
use flexcomm_trainer::Tick;
use std::time::{Duration, Instant};

/// A gradient that could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// Between ranks.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// On this rank, or in all ranks' messages.
    #[error(transparent)]
    Bucket(#[from] flexcomm_exchange::ExchangeError),
    /// NaN or infinity.
    #[error("exchange a gradient with NaN or infinite values")]
    NotFinite,
    /// This rank has no part in the exchange.
    #[error("exchange the gradient: {0}")]
    Failed(String),
}

impl From<GenerateError> for SyncError {
    fn from(error: GenerateError) -> Self {
        Self::Exchange(error.into())
    }
}

/// What an exchange cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Compress and decompress.
    pub comp: Duration,
    /// In collectives, waiting for late ranks included.
    pub sync: Duration,
    /// The part of `sync` before the last rank entered; absent when the ranks do not share a clock.
    pub wait: Option<Duration>,
    /// Bytes of frames this rank sent.
    pub bytes: u64,
    /// Of this rank's gradient.
    pub energy: Energy,
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
        (seed, learning_rate): (u64, f64),
    ) -> Result<Self, flexcomm_exchange::ExchangeError> {
        let (rank, world) = (exchanger.mesh().rank().0, exchanger.mesh().world() as u32);
        let bucket = Bucket::new(0, params, Member { rank, world, ..Member::alone(seed) }, None)?;
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
    /// all ranks.
    pub fn run(&mut self, check: u32, tick: &Tick, gradient: &[f32], mean: &mut [f32]) -> Result<Cost, SyncError> {
        // A trial's first step copies the pipeline, which is no part of a candidate's time.
        self.bucket.in_trial(tick.trial.is_some())?;
        self.bucket.prepare(tick.strategy.spec(), None)?;
        let started = Instant::now();
        let bytes = self.exchanger.mesh().bytes_sent();
        self.exchanger.begin_step(check);
        mean.copy_from_slice(gradient);
        let energy = match tick.strategy.is_dense() && !self.bucket.has_residual() {
            true => self.dense(&tick.strategy, mean)?,
            false => self.compressed(tick, mean)?,
        };
        let sync = self.exchanger.sync_time();
        let bytes = self.exchanger.mesh().bytes_sent() - bytes;
        let wait = self.exchanger.wait_time();
        Ok(Cost { comp: started.elapsed().saturating_sub(sync), sync, wait, bytes, energy })
    }

    fn dense(&mut self, strategy: &Strategy, mean: &mut [f32]) -> Result<Energy, SyncError> {
        self.exchanger.run(sums_by(strategy.collective()), &mut Values(mean))?;
        let world = self.world() as f32;
        mean.iter_mut().for_each(|value| *value /= world);
        Ok(Energy::default())
    }

    /// `mean` holds the gradient until it is the mean.
    fn compressed(&mut self, tick: &Tick, mean: &mut [f32]) -> Result<Energy, SyncError> {
        let index = turn(tick);
        let step = Step { index, learning_rate: self.learning_rate };
        let mut round = self.bucket.begin(mean, step, leader(tick, self.world()));
        loop {
            self.refuse_own()?;
            self.carry(&tick.strategy, round)?;
            let parts: Vec<&[u8]> = match round.how {
                How::Gather if round.bytes == 0 => vec![&[]; self.exchanger.mesh().world()],
                How::Gather => self.buffer.chunks_exact(round.bytes).collect(),
                _ => vec![&self.buffer],
            };
            if round.last {
                let ran = self.bucket.finish(false, &parts, mean)?;
                return if ran == Ran::Good { Ok(self.bucket.energy()) } else { Err(SyncError::NotFinite) };
            }
            round = self.bucket.next(false, &parts)?;
        }
    }

    /// A rank that has no part ends, and its peers find the connection closed.
    fn refuse_own(&mut self) -> Result<(), SyncError> {
        match self.bucket.status() {
            Status::Ready => Ok(()),
            Status::NotFinite => Err(SyncError::NotFinite),
            Status::Failed => Err(SyncError::Failed(self.bucket.fault().to_owned())),
        }
    }

    /// Runs the collective of a round; what it brings is in `self.buffer`.
    fn carry(&mut self, strategy: &Strategy, round: Round) -> Result<(), SyncError> {
        let (world, own) = (self.world(), self.rank().index() * round.bytes);
        let Self { exchanger, bucket, buffer, .. } = self;
        buffer.clear();
        buffer.resize(if round.how == How::Gather { world * round.bytes } else { round.bytes }, 0);
        match round.how {
            How::Refused => {}
            How::Gather => {
                bucket.write(&mut buffer[own..own + round.bytes]);
                exchanger.run(Kind::Gather, &mut Blocks(buffer))?;
            }
            How::Broadcast(root) => {
                bucket.write(buffer);
                exchanger.run(Kind::Broadcast(Rank(root)), &mut Blocks(buffer))?;
            }
            How::Sum(element) => {
                bucket.write(buffer);
                let kind = sums_by(strategy.collective());
                exchanger.run(kind, &mut Elements { bytes: buffer, element })?;
            }
        }
        Ok(())
    }
}

/// The schedule by which elements add up.
fn sums_by(collective: Collective) -> Kind {
    match collective {
        Collective::DenseTree | Collective::ArtTree => Kind::Tree,
        Collective::DenseRing | Collective::ArtRing | Collective::Allgather => Kind::Ring,
    }
}

/// A number that differs between steps; a trial's iterations go on from its step.
fn turn(tick: &Tick) -> u64 {
    tick.step + tick.trial.map_or(0, |t| u64::from(t.within))
}

/// Who leads AR-Topk.
fn leader(tick: &Tick, world: usize) -> Option<Leader> {
    match tick.strategy.selection()? {
        Selection::Star => Some(Leader::Rank((turn(tick) % world as u64) as u32)),
        Selection::Var => Some(Leader::Largest),
    }
}
