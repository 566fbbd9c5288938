//! One gradient exchange under a strategy: every rank ends with the same mean gradient, bit for bit.
//!
//! That holds because each value is summed on one rank (ring, tree) or in one order (allgather: by rank) and
//! copied from there, and because every rank divides alike.

use super::exchange::{Blocks, ExchangeError, Exchanger, Kind, Values};
use flexcomm_collectives::GenerateError;
use flexcomm_compression::{
    AggregateError, Checksum, CompressError, DecodeError, Energy, GradientCompressor, Layers, Memory, Message, Method,
    Part, aggregate, encode, message_bytes, scatter_mean,
};
use flexcomm_domain::{Collective, Rank, Selection, Strategy};
use flexcomm_trainer::{Agreement, Tick};
use std::time::{Duration, Instant};

/// A gradient that could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// Between ranks.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// On this rank.
    #[error(transparent)]
    Compress(#[from] CompressError),
    /// A rank's message is not one.
    #[error("read the compressed gradient of rank {rank}: {source}")]
    Decode {
        /// Whose.
        rank: Rank,
        /// What was wrong.
        source: DecodeError,
    },
    /// A rank's message does not fit this gradient.
    #[error("read the compressed gradient of rank {rank}: it has {got} values for {n}, expected {expected} for {own}")]
    Size {
        /// Whose.
        rank: Rank,
        /// Values kept.
        got: usize,
        /// Of how many.
        n: u64,
        /// Values that should be kept.
        expected: usize,
        /// Of how many.
        own: usize,
    },
    /// A strategy that another trainer could run.
    #[error("run {0}: the lab's workers have dense, topk, lwtopk and mstopk with ef(vanilla)")]
    NoSuchMethod(Box<Strategy>),
    /// Messages do not add up.
    #[error(transparent)]
    Aggregate(#[from] AggregateError),
}

/// What the workers' compressor calls it.
pub fn method_of(strategy: &Strategy) -> Result<Method, SyncError> {
    Method::of(strategy).ok_or(SyncError::NoSuchMethod((*strategy).into()))
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

/// A rank's compressor and its connections.
pub struct Synchronizer {
    exchanger: Exchanger,
    compressor: GradientCompressor,
    seed: u64,
    message: Vec<u8>,
    blocks: Vec<u8>,
    indices: Vec<u32>,
    values: Vec<f32>,
}

impl Synchronizer {
    /// With an empty memory. `seed` is MSTopk's only randomness.
    pub fn new(exchanger: Exchanger, layers: Layers, seed: u64) -> Self {
        let compressor = GradientCompressor::new(layers);
        let (message, blocks, indices, values) = Default::default();
        Self { exchanger, compressor, seed, message, blocks, indices, values }
    }

    /// The connections.
    pub fn exchanger(&mut self) -> &mut Exchanger {
        &mut self.exchanger
    }

    /// Copies the memory of error feedback.
    pub fn save(&self) -> Memory {
        self.compressor.save()
    }

    /// Puts it back.
    pub fn restore(&mut self, memory: &Memory) -> Result<(), CompressError> {
        self.compressor.restore(memory)
    }

    fn world(&self) -> usize {
        self.exchanger.mesh().world()
    }

    fn rank(&self) -> Rank {
        self.exchanger.mesh().rank()
    }

    /// Replaces `mean` by the mean of all ranks' error-fed (and compressed) gradients.
    pub fn run(
        &mut self,
        agreement: &mut Agreement,
        tick: &Tick,
        gradient: &[f32],
        mean: &mut [f32],
    ) -> Result<Cost, SyncError> {
        let started = Instant::now();
        let bytes = self.exchanger.mesh().bytes_sent();
        self.exchanger.begin_step();
        let energy = match tick.strategy.collective() {
            Collective::DenseRing => self.dense(agreement, Kind::Ring, gradient, mean)?,
            Collective::DenseTree => self.dense(agreement, Kind::Tree, gradient, mean)?,
            Collective::Allgather => self.gather(agreement, tick, gradient, mean)?,
            Collective::ArtRing => self.art(agreement, (tick, Kind::Ring), gradient, mean)?,
            Collective::ArtTree => self.art(agreement, (tick, Kind::Tree), gradient, mean)?,
        };
        let sync = self.exchanger.sync_time();
        let bytes = self.exchanger.mesh().bytes_sent() - bytes;
        let wait = self.exchanger.wait_time();
        Ok(Cost { comp: started.elapsed().saturating_sub(sync), sync, wait, bytes, energy })
    }

    fn dense(
        &mut self,
        agreement: &mut Agreement,
        kind: Kind,
        gradient: &[f32],
        mean: &mut [f32],
    ) -> Result<Energy, SyncError> {
        let energy = self.compressor.take_all(gradient, mean)?;
        self.exchanger.run(kind, &mut Values(mean), agreement)?;
        let world = self.world() as f32;
        mean.iter_mut().for_each(|value| *value /= world);
        Ok(energy)
    }

    fn gather(
        &mut self,
        agreement: &mut Agreement,
        tick: &Tick,
        gradient: &[f32],
        mean: &mut [f32],
    ) -> Result<Energy, SyncError> {
        let method = method_of(&tick.strategy)?;
        let seed = self.seed_of(tick);
        let sent = self.compressor.compress(method, gradient, seed)?;
        let energy = sent.energy;
        encode(method.compressor, sent.selection, Part::Whole, Checksum::None, &mut self.message);
        let block = message_bytes(method.kept(self.compressor.layers()), Part::Whole);
        self.all_blocks(agreement, block)?;
        let mut messages = Vec::with_capacity(self.world());
        for (rank, bytes) in self.blocks.chunks_exact(block).enumerate() {
            messages.push(self.parse(Rank(rank as u32), bytes, &tick.strategy)?);
        }
        aggregate(&messages, self.world(), mean)?;
        Ok(energy)
    }

    /// Every rank's `self.message`, `block` bytes each, into `self.blocks`.
    fn all_blocks(&mut self, agreement: &mut Agreement, block: usize) -> Result<(), SyncError> {
        let own = self.rank().index() * block;
        self.blocks.clear();
        self.blocks.resize(block * self.world(), 0);
        let end = own + self.message.len().min(block);
        self.blocks[own..end].copy_from_slice(&self.message[..end - own]);
        Ok(self.exchanger.run(Kind::Gather, &mut Blocks(&mut self.blocks), agreement)?)
    }

    fn parse<'a>(&self, rank: Rank, bytes: &'a [u8], strategy: &Strategy) -> Result<Message<'a>, SyncError> {
        let message = Message::parse(bytes).map_err(|source| SyncError::Decode { rank, source })?;
        let own = self.compressor.layers().values();
        let expected = method_of(strategy)?.kept(self.compressor.layers());
        if message.n() != own as u64 || message.k() != expected {
            return Err(SyncError::Size { rank, got: message.k(), n: message.n(), expected, own });
        }
        Ok(message)
    }

    /// AR-Topk: one rank's indices count, every rank's values at them are summed.
    fn art(
        &mut self,
        agreement: &mut Agreement,
        (tick, kind): (&Tick, Kind),
        gradient: &[f32],
        mean: &mut [f32],
    ) -> Result<Energy, SyncError> {
        let root = self.choose(agreement, tick, gradient)?;
        let method = method_of(&tick.strategy)?;
        let k = method.kept(self.compressor.layers());
        self.message.resize(message_bytes(k, Part::Indices), 0);
        self.exchanger.run(Kind::Broadcast(root), &mut Blocks(&mut self.message), agreement)?;
        self.parse(root, &self.message, &tick.strategy)?.indices_into(&mut self.indices);
        let energy = self.compressor.take_at(&self.indices, &mut self.values)?;
        self.exchanger.run(kind, &mut Values(&mut self.values), agreement)?;
        scatter_mean(&self.indices, &self.values, self.world(), mean)?;
        Ok(energy)
    }

    /// The rank whose indices count; leaves its message in `self.message` there.
    fn choose(&mut self, agreement: &mut Agreement, tick: &Tick, gradient: &[f32]) -> Result<Rank, SyncError> {
        let method = method_of(&tick.strategy)?;
        let seed = self.seed_of(tick);
        let star = self.star(tick);
        if tick.strategy.selection() != Some(Selection::Var) && star != self.rank() {
            self.compressor.feed(gradient)?;
            return Ok(star);
        }
        let picked = self.compressor.select(method, gradient, seed)?;
        let energy = picked.energy.sent;
        let mut indices = Vec::new();
        encode(method.compressor, picked.selection, Part::Indices, Checksum::None, &mut indices);
        let root = match tick.strategy.selection() {
            Some(Selection::Var) => {
                self.message = energy.to_le_bytes().to_vec();
                self.all_blocks(agreement, 8)?;
                largest(&self.blocks)
            }
            _ => star,
        };
        self.message = indices;
        Ok(root)
    }

    /// Round robin; a trial's iterations go on from its step.
    fn star(&self, tick: &Tick) -> Rank {
        let turn = tick.step + tick.trial.map_or(0, |t| u64::from(t.within));
        Rank((turn % self.world() as u64) as u32)
    }

    fn seed_of(&self, tick: &Tick) -> u64 {
        let turn = tick.step + tick.trial.map_or(0, |t| u64::from(t.within));
        // Odd multipliers keep different steps and ranks apart.
        let rank = u64::from(self.rank().0);
        self.seed ^ turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ rank.wrapping_mul(0xc2b2_ae3d_27d4_eb4f)
    }
}

/// The rank with the largest energy, the lowest one among equals: every rank sees the same bytes.
fn largest(energies: &[u8]) -> Rank {
    let mut best = (0, f64::NEG_INFINITY);
    for (rank, bytes) in energies.chunks_exact(8).enumerate() {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        let energy = f64::from_le_bytes(word);
        if energy.total_cmp(&best.1).is_gt() {
            best = (rank as u32, energy);
        }
    }
    Rank(best.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn var_takes_the_lowest_of_equals_and_stands_any_bytes() {
        let bytes = |energies: &[f64]| energies.iter().flat_map(|e| e.to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(largest(&bytes(&[1.0, 3.0, 3.0, 2.0])), Rank(1));
        assert_eq!(largest(&bytes(&[0.0, 0.0])), Rank(0));
        assert_eq!(largest(&bytes(&[1.0, f64::NAN, f64::NAN])), Rank(1));
        assert_eq!(largest(&[]), Rank(0));
    }
}
