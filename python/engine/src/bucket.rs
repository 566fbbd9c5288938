//! One DDP bucket: its parameters, its memory, and the exchange under way.
//!
//! Every exchange has two halves. The first never fails: what is wrong with this rank's part becomes a status that
//! travels with it, so that no rank is left waiting. The second half knows what all ranks said; only then does what
//! was sent leave the memory.

mod device;

pub use device::{Answers, Home, OnHost, chooses, kernels};

use crate::error::EngineError;
use crate::piped::Piped;
use device::Resident;
use flexcomm_compression::{
    Checksum, CompressError, Energy, GradientCompressor, Layers, Memory, Message, Method, Part, aggregate, encode,
    message_bytes, scatter_mean,
};
use flexcomm_domain::CompressorSpec;
use flexcomm_trainer::{HEAD_BYTES, Heard, Status};

/// Bytes of VAR's side message: a head and this rank's energy.
pub const INDEX_HEAD: usize = HEAD_BYTES + 8;

/// A parameter's place in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// The same for a parameter as long as the model lives.
    pub id: u32,
    /// Values.
    pub len: usize,
    /// Values per row where it is a matrix, 1 where it is a vector; divides `len`.
    pub cols: usize,
}

/// How an exchange ended, the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ran {
    /// The mean gradient is there.
    Good,
    /// Some rank's gradient was not finite: the result is NaN everywhere, what was held back is as before.
    NotFinite,
}

/// Which exchange is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exchange {
    /// None.
    Idle,
    /// Selected, nothing counts as sent.
    Selected,
    /// AR-Topk: values at the leader's indices were taken.
    Taken,
    /// Dense: everything was taken.
    Flushed,
}

/// A bucket's compressor and buffers.
#[derive(Debug)]
pub struct Bucket {
    index: u32,
    params: Vec<Param>,
    compressor: GradientCompressor,
    /// See [`Self::holds_back`].
    holds_back: bool,
    /// Steps since the layout changed.
    age: u64,
    state: Exchange,
    status: Status,
    fault: String,
    energy: Energy,
    indices: Vec<u32>,
    values: Vec<f32>,
    scratch: Vec<u8>,
    saved: Memory,
    /// Under a strategy that a pipeline runs.
    piped: Option<Box<Piped>>,
    /// In a trial: training's own pipeline, or that there is none, which no candidate touches.
    parked: Option<Option<Box<Piped>>>,
    /// While what is held back lies on a device; the compressor's residual is then out of date.
    resident: Option<Resident>,
}

impl Bucket {
    /// With what was held back of its parameters so far; none = nothing.
    pub fn new(index: u32, params: Vec<Param>, residual: Option<Vec<f32>>) -> Result<Self, EngineError> {
        let lengths: Vec<usize> = params.iter().map(|p| p.len).collect();
        let mut compressor = GradientCompressor::new(Layers::new(&lengths)?);
        let holds_back = residual.is_some();
        if let Some(residual) = residual {
            compressor.restore(&Memory::from_values(residual))?;
        }
        let (indices, values, scratch, saved, fault) = Default::default();
        let (status, energy) = Default::default();
        let state = Exchange::Idle;
        Ok(Self {
            index,
            params,
            compressor,
            holds_back,
            age: 0,
            state,
            status,
            fault,
            energy,
            indices,
            values,
            scratch,
            saved,
            piped: None,
            parked: None,
            resident: None,
        })
    }

    /// Its parameters in order.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// n.
    pub fn values(&self) -> usize {
        self.compressor.layers().values()
    }

    /// Whether the residual may hold something back. It decides which collective a dense step runs: so it follows from what
    /// all ranks have done, never from this rank's values, which may happen to be zero.
    pub fn holds_back(&self) -> bool {
        self.holds_back
    }

    /// Whether the residual or the pipeline may hold something back: the same on all ranks.
    pub fn remembers(&self) -> bool {
        self.holds_back || self.pipes().any(|piped| !piped.held_back().is_empty())
    }

    /// What is held back, whatever holds it on the host: see [`Self::come_home`].
    pub fn held_back(&self) -> Vec<f32> {
        let mut held = self.residual().to_vec();
        for piped in self.pipes() {
            held.iter_mut().zip(piped.held_back()).for_each(|(to, value)| *to += value);
        }
        held
    }

    fn pipes(&self) -> impl Iterator<Item = &Piped> {
        self.piped.iter().chain(self.parked.iter().flatten()).map(|piped| &**piped)
    }

    /// A step begins, of a trial or of training: a trial's candidates do not touch training's pipeline.
    pub fn in_trial(&mut self, trial: bool) -> Result<(), EngineError> {
        match (trial, self.parked.is_some()) {
            (true, false) => self.parked = Some(self.piped.take()),
            (false, true) => {
                // Of a trial that was left in the midst of it: what its last candidate holds back stays.
                self.unpipe()?;
                self.piped = self.parked.take().flatten();
                if self.holds_back {
                    // Training's pipeline is made anew of both.
                    self.unpipe()?;
                }
            }
            (true, true) | (false, false) => {}
        }
        Ok(())
    }

    /// What the pipeline runs, where there is one.
    pub fn piped_spec(&self) -> Option<&CompressorSpec> {
        self.piped.as_ref().map(|piped| piped.spec())
    }

    /// The pipeline of a strategy that is named by a text; `make` makes it of what is held back, which it takes over.
    pub fn piped(
        &mut self,
        make: impl FnOnce(u32, &[Param], &[f32]) -> Result<Piped, EngineError>,
    ) -> Result<&mut Piped, EngineError> {
        let piped = match self.piped.take() {
            Some(piped) => piped,
            None => {
                self.come_home()?;
                let piped = Box::new(make(self.index, &self.params, self.compressor.residual())?);
                self.compressor.restore(&Memory::from_values(vec![0.0; self.values()]))?;
                self.holds_back = false;
                piped
            }
        };
        Ok(self.piped.insert(piped))
    }

    /// The pipeline, where there is one.
    pub fn pipe(&mut self) -> Option<&mut Piped> {
        self.piped.as_deref_mut()
    }

    /// Training's own pipeline, where there is one, also in a trial.
    pub fn own_pipe(&self) -> Option<&Piped> {
        self.parked.as_ref().unwrap_or(&self.piped).as_deref()
    }

    /// Forgets the pipeline and what it holds back.
    pub fn drop_pipe(&mut self) {
        (self.piped, self.parked) = (None, None);
    }

    /// Another kind of strategy is in force: what the pipeline holds back goes into this bucket's residual.
    pub fn unpipe(&mut self) -> Result<(), EngineError> {
        if self.piped.is_none() {
            return Ok(());
        }
        self.come_home()?;
        let Some(piped) = self.piped.take() else { return Ok(()) };
        let (mut held, more) = (self.residual().to_vec(), piped.held_back());
        held.iter_mut().zip(&more).for_each(|(to, value)| *to += value);
        Ok(self.set_residual(Memory::from_values(held), self.holds_back || !more.is_empty())?)
    }

    /// What the residual holds back on the host: see [`Self::come_home`].
    pub fn residual(&self) -> &[f32] {
        self.compressor.residual()
    }

    /// Replaces what the residual holds back; [`Self::holds_back`] is what the ranks agree on about it.
    pub fn set_residual(&mut self, residual: Memory, holds_back: bool) -> Result<(), CompressError> {
        self.state = Exchange::Idle;
        self.resident = None;
        if self.parked.is_some() {
            self.piped = None;
        }
        self.compressor.restore(&residual)?;
        self.holds_back = holds_back;
        Ok(())
    }

    /// Copies what is held back on the host: see [`Self::come_home`].
    pub fn save_into(&self, memory: &mut Memory) {
        self.compressor.save_into(memory);
    }

    /// Counts a step with this layout; answers how many came before it.
    pub fn enter(&mut self) -> u64 {
        self.state = Exchange::Idle;
        self.abandon_on_device();
        self.energy = Energy::default();
        let before = self.age;
        self.age += 1;
        before
    }

    /// Of the last exchange that compressed, for the gain; zeros otherwise.
    pub fn energy(&self) -> Energy {
        self.energy
    }

    /// k of a method here.
    pub fn kept(&self, method: Method) -> usize {
        method.kept(self.compressor.layers())
    }

    /// Bytes of this bucket's message.
    pub fn message_bytes(&self, method: Method, part: Part) -> usize {
        message_bytes(self.kept(method), part)
    }

    fn failed(&mut self, error: &dyn std::fmt::Display) -> Status {
        self.fault = error.to_string();
        Status { failed: true, ..Status::default() }
    }

    fn begin(&mut self, run: impl FnOnce(&mut Self) -> Result<(), EngineError>) -> Status {
        self.fault.clear();
        self.status = match self.come_home().and_then(|()| run(self)) {
            Ok(()) => Status::default(),
            Err(EngineError::Compress(error @ CompressError::NonFinite { .. })) => {
                self.fault = error.to_string();
                Status { not_finite: true, ..Status::default() }
            }
            Err(error) => self.failed(&error),
        };
        self.status
    }

    fn select(&mut self, method: Method, gradient: &[f32], seed: u64, part: Part) -> Result<(), EngineError> {
        let picked = self.compressor.select(method, gradient, seed)?;
        self.energy = picked.energy;
        self.indices.clear();
        self.indices.extend_from_slice(picked.selection.indices());
        encode(method.compressor, picked.selection, part, Checksum::None, &mut self.scratch);
        self.state = Exchange::Selected;
        Ok(())
    }

    /// Allgather, first half: this rank's message ([`Self::message_bytes`] of [`Part::Whole`]).
    pub fn pack(&mut self, method: Method, gradient: &[f32], seed: u64, message: &mut [u8]) -> Status {
        let status = self.begin(|own| own.select(method, gradient, seed, Part::Whole));
        self.write(status, message)
    }

    fn write(&mut self, status: Status, message: &mut [u8]) -> Status {
        message.fill(0);
        if status != Status::default() {
            return status;
        }
        if message.len() != self.scratch.len() {
            let text = format!("its message has {} bytes, there is room for {}", self.scratch.len(), message.len());
            self.status = self.failed(&text);
            return self.status;
        }
        message.copy_from_slice(&self.scratch);
        status
    }

    /// Allgather, second half: `out` becomes the mean of all ranks' messages, given in rank order.
    pub fn unpack(
        &mut self,
        heard: &Heard,
        method: Method,
        messages: &[&[u8]],
        out: &mut [f32],
    ) -> Result<Ran, EngineError> {
        if let Some(ran) = self.refuse(heard, out)? {
            return Ok(ran);
        }
        let mut parsed = Vec::with_capacity(messages.len());
        for (rank, bytes) in messages.iter().enumerate() {
            parsed.push(self.parse(rank, bytes, method)?);
        }
        self.settle()?;
        aggregate(&parsed, messages.len(), out)?;
        Ok(Ran::Good)
    }

    /// What was selected now counts as sent.
    fn settle(&mut self) -> Result<(), EngineError> {
        if self.state != Exchange::Selected {
            return Err(EngineError::Order { bucket: self.index, what: "nothing was selected" });
        }
        self.compressor.take_at(&self.indices, &mut self.values)?;
        self.holds_back = true;
        self.state = Exchange::Idle;
        Ok(())
    }

    fn parse<'a>(&self, rank: usize, bytes: &'a [u8], method: Method) -> Result<Message<'a>, EngineError> {
        let message = Message::parse(bytes).map_err(|source| EngineError::Decode { rank, source })?;
        let (own, expected) = (self.values(), self.kept(method));
        if message.n() != own as u64 || message.k() != expected {
            return Err(EngineError::Size { rank, got: message.k(), n: message.n(), expected, own });
        }
        Ok(message)
    }

    /// Puts the memory back when some rank could not do its part.
    fn refuse(&mut self, heard: &Heard, out: &mut [f32]) -> Result<Option<Ran>, EngineError> {
        if heard.good() {
            return Ok(None);
        }
        self.put_back(out)?;
        if heard.failed > 0 {
            return Err(EngineError::peer(self.index, heard, &self.fault));
        }
        out.fill(f32::NAN);
        Ok(Some(Ran::NotFinite))
    }

    /// `gradient` is what this exchange began with.
    fn put_back(&mut self, gradient: &[f32]) -> Result<(), EngineError> {
        let state = std::mem::replace(&mut self.state, Exchange::Idle);
        self.energy = Energy::default();
        match state {
            Exchange::Idle | Exchange::Selected => self.compressor.abandon(),
            Exchange::Flushed => self.compressor.restore(&self.saved)?,
            Exchange::Taken => {
                // fed = what is left + what was taken; the residual before it was fed - gradient.
                let mut fed = self.compressor.residual().to_vec();
                self.indices.iter().zip(&self.values).for_each(|(i, v)| fed[*i as usize] += v);
                fed.iter_mut().zip(gradient).for_each(|(f, g)| *f -= g);
                self.compressor.restore(&Memory::from_values(fed))?;
            }
        }
        Ok(())
    }

    /// AR-Topk, first: error feedback, and a selection where this rank's may count.
    pub fn choose(&mut self, method: Method, gradient: &[f32], seed: u64, may_lead: bool) -> Status {
        self.begin(|own| {
            if may_lead {
                return own.select(method, gradient, seed, Part::Indices);
            }
            let fed = own.compressor.feed(gradient)?;
            own.energy = Energy { sent: 0.0, fed };
            own.state = Exchange::Selected;
            Ok(())
        })
    }

    /// AR-Topk under VAR: what this rank's selection weighs, below all others when it has none.
    pub fn weight(&self) -> f64 {
        if self.status == Status::default() { self.energy.sent } else { f64::NEG_INFINITY }
    }

    /// AR-Topk: the leader's message of indices.
    pub fn write_indices(&mut self, message: &mut [u8]) -> Status {
        self.write(self.status, message)
    }

    /// AR-Topk: takes this rank's values at the leader's indices; zeros when something is wrong here. With
    /// `leader_good` false the leader's own status tells everybody.
    pub fn take(&mut self, method: Method, leader: (usize, bool), message: &[u8], values: &mut [f32]) -> Status {
        values.fill(0.0);
        if self.status != Status::default() || !leader.1 {
            return self.status;
        }
        let taken = self.take_indices(method, leader.0, message);
        match taken {
            Ok(()) if self.values.len() == values.len() => values.copy_from_slice(&self.values),
            Ok(()) => self.status = self.failed(&"its values do not fit"),
            Err(error) => self.status = self.failed(&error),
        }
        self.status
    }

    fn take_indices(&mut self, method: Method, leader: usize, message: &[u8]) -> Result<(), EngineError> {
        let mut indices = std::mem::take(&mut self.indices);
        self.parse(leader, message, method)?.indices_into(&mut indices);
        self.indices = indices;
        self.energy = self.compressor.take_at(&self.indices, &mut self.values)?;
        self.state = Exchange::Taken;
        Ok(())
    }

    /// ‖g_e‖ for the skew, 0 when this rank has none.
    pub fn norm(&self) -> f64 {
        if self.status == Status::default() { self.energy.fed.sqrt() } else { 0.0 }
    }

    /// AR-Topk, last: `out` becomes the mean at the leader's indices, zero elsewhere.
    pub fn scatter(&mut self, heard: &Heard, sums: &[f32], world: usize, out: &mut [f32]) -> Result<Ran, EngineError> {
        if let Some(ran) = self.refuse(heard, out)? {
            return Ok(ran);
        }
        if self.state != Exchange::Taken {
            return Err(EngineError::Order { bucket: self.index, what: "no values were taken" });
        }
        self.state = Exchange::Idle;
        // Not where they were taken: a rank whose gradient is not finite takes none.
        self.holds_back = true;
        scatter_mean(&self.indices, sums, world, out)?;
        Ok(Ran::Good)
    }

    /// Dense with what was held back, first half: `out` becomes (gradient + residual) / `world`, and the plain
    /// gradient when that is not finite, so that the sum is not finite either.
    pub fn flush(&mut self, gradient: &[f32], world: usize, out: &mut [f32]) -> Status {
        let status = self.begin(|own| {
            own.compressor.save_into(&mut own.saved);
            own.energy = own.compressor.take_all(gradient, out)?;
            own.state = Exchange::Flushed;
            Ok(())
        });
        if status != Status::default() && gradient.len() == out.len() {
            out.copy_from_slice(gradient);
        }
        let world = world as f32;
        out.iter_mut().for_each(|v| *v /= world);
        status
    }

    /// Dense with what was held back, second half: `sum` is the mean gradient already.
    pub fn flushed(&mut self, heard: &Heard, sum: &mut [f32]) -> Result<Ran, EngineError> {
        if let Some(ran) = self.refuse(heard, sum)? {
            return Ok(ran);
        }
        self.state = Exchange::Idle;
        self.holds_back = false;
        Ok(Ran::Good)
    }
}

/// The rank with the most energy, the lowest among equals, from VAR's side messages: all ranks see the same bytes.
pub fn energies(messages: &[u8]) -> usize {
    let mut best = (0, f64::NEG_INFINITY);
    for (rank, message) in messages.chunks_exact(INDEX_HEAD).enumerate() {
        let mut word = [0; 8];
        word.copy_from_slice(&message[HEAD_BYTES..]);
        let energy = f64::from_le_bytes(word);
        if energy > best.1 {
            best = (rank, energy);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_compression::Compressor;
    use flexcomm_domain::CompressionRatio;

    const GOOD: Heard = Heard { failed: 0, first_failed: None, not_finite: 0, first_not_finite: None };

    fn method(cr: f64) -> Method {
        Method::new(Compressor::TopK, CompressionRatio::new(cr).unwrap())
    }

    fn bucket() -> Bucket {
        Bucket::new(0, vec![Param { id: 0, len: 4, cols: 1 }, Param { id: 1, len: 4, cols: 1 }], None).unwrap()
    }

    fn gradient(seed: u32) -> Vec<f32> {
        (0..8u32).map(|i| ((i * 7 + seed * 13) % 11) as f32 - 5.0).collect()
    }

    /// Packs on every rank, and answers messages and statuses.
    fn pack(ranks: &mut [Bucket], gradients: &[Vec<f32>]) -> (Vec<Vec<u8>>, Vec<Status>) {
        let m = method(0.25);
        let mut messages = vec![vec![0; ranks[0].message_bytes(m, Part::Whole)]; ranks.len()];
        let pairs = ranks.iter_mut().zip(gradients).zip(&mut messages);
        let statuses = pairs.map(|((b, g), out)| b.pack(m, g, 1, out)).collect();
        (messages, statuses)
    }

    #[test]
    fn what_is_sent_and_what_is_held_back_add_up() {
        let mut ranks = [bucket(), bucket()];
        let mut total = [0.0; 8];
        let mut applied = [0.0; 8];
        for step in 0..10 {
            let gradients = vec![gradient(step), gradient(step + 5)];
            total.iter_mut().enumerate().for_each(|(i, t)| *t += gradients[0][i] + gradients[1][i]);
            let (messages, _) = pack(&mut ranks, &gradients);
            let views: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
            let mut means = [vec![0.0; 8], vec![1.0; 8]];
            for (rank, mean) in ranks.iter_mut().zip(&mut means) {
                assert_eq!(rank.unpack(&GOOD, method(0.25), &views, mean).unwrap(), Ran::Good);
            }
            assert_eq!(means[0], means[1]);
            applied.iter_mut().zip(&means[0]).for_each(|(a, m)| *a += m * 2.0);
        }
        assert!(ranks.iter().all(Bucket::holds_back));
        for i in 0..8 {
            let held: f32 = ranks.iter().map(|r| r.residual()[i]).sum();
            assert!((applied[i] + held - total[i]).abs() < 1e-3);
        }
        // Going dense sends the rest.
        let mut out = vec![0.0; 8];
        let before = ranks[0].residual().to_vec();
        assert_eq!(ranks[0].flush(&[0.0; 8], 2, &mut out), Status::default());
        ranks[0].flushed(&GOOD, &mut out.clone()).unwrap();
        assert_eq!(out, before.iter().map(|v| v / 2.0).collect::<Vec<_>>());
        assert!(!ranks[0].holds_back() && ranks[0].residual().iter().all(|v| *v == 0.0));
    }

    #[test]
    fn a_nan_on_one_rank_changes_nobodys_memory() {
        let mut ranks = [bucket(), bucket()];
        let (messages, _) = pack(&mut ranks, &[gradient(1), gradient(2)]);
        let views: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
        ranks.iter_mut().for_each(|r| {
            r.unpack(&GOOD, method(0.25), &views, &mut [0.0; 8]).unwrap();
        });
        let before: Vec<_> = ranks.iter().map(|r| r.residual().to_vec()).collect();

        let mut bad = gradient(3);
        bad[2] = f32::NAN;
        let (messages, statuses) = pack(&mut ranks, &[gradient(4), bad.clone()]);
        assert_eq!((statuses[0].not_finite, statuses[1].not_finite), (false, true));
        let heard = Heard { not_finite: 1, first_not_finite: Some(1), ..GOOD };
        let views: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
        for (rank, before) in ranks.iter_mut().zip(&before) {
            let mut out = vec![0.0; 8];
            assert_eq!(rank.unpack(&heard, method(0.25), &views, &mut out).unwrap(), Ran::NotFinite);
            assert!(out.iter().all(|v| v.is_nan()));
            assert_eq!(rank.residual(), before);
        }
        // The same by AR-Topk, whose good rank has taken values already.
        let mut message = vec![0; ranks[0].message_bytes(method(0.25), Part::Indices)];
        assert_eq!(ranks[0].choose(method(0.25), &gradient(4), 1, true), Status::default());
        assert_eq!(ranks[0].write_indices(&mut message), Status::default());
        assert!(ranks[1].choose(method(0.25), &bad, 1, false).not_finite);
        let mut values = [0.0; 2];
        assert_eq!(ranks[0].take(method(0.25), (0, true), &message, &mut values), Status::default());
        assert!(ranks[1].take(method(0.25), (0, true), &message, &mut values).not_finite);
        for ((rank, before), gradient) in ranks.iter_mut().zip(&before).zip([gradient(4), bad.clone()]) {
            let mut out = gradient;
            assert_eq!(rank.scatter(&heard, &values, 2, &mut out).unwrap(), Ran::NotFinite);
            for (a, b) in rank.residual().iter().zip(before) {
                assert!((a - b).abs() < 1e-5);
            }
        }
        // And dense.
        let mut out = vec![0.0; 8];
        assert!(ranks[1].flush(&bad, 2, &mut out).not_finite && out[2].is_nan());
        ranks[1].flushed(&heard, &mut out).unwrap();
        assert_eq!(ranks[1].residual(), before[1]);
    }

    /// One allreduce more or less on one rank, or one of another size, would end the job.
    #[test]
    fn whether_anything_may_be_held_back_is_the_same_on_a_rank_that_holds_only_zeros() {
        let (zeros, m) = (vec![0.0; 8], method(0.25));
        // Allgather, and what a trial puts back.
        let mut ranks = [bucket(), bucket()];
        let (messages, _) = pack(&mut ranks, &[gradient(1), zeros.clone()]);
        let views: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
        for rank in &mut ranks {
            rank.unpack(&GOOD, m, &views, &mut [0.0; 8]).unwrap();
            let (held, holds_back) = (Memory::from_values(rank.held_back()), rank.holds_back());
            rank.set_residual(held, holds_back).unwrap();
        }
        assert!(ranks[1].residual().iter().all(|v| *v == 0.0) && ranks.iter().all(Bucket::holds_back));

        // AR-Topk, of which the second rank took nothing in a step that was refused, and did in the next.
        let mut ranks = [bucket(), bucket()];
        let refused = Heard { not_finite: 1, first_not_finite: Some(1), ..GOOD };
        let mut message = vec![0; ranks[0].message_bytes(m, Part::Indices)];
        for (second, heard, expected) in [(vec![f32::NAN; 8], refused, false), (zeros.clone(), GOOD, true)] {
            ranks[0].choose(m, &gradient(1), 1, true);
            ranks[0].write_indices(&mut message);
            ranks[1].choose(m, &second, 1, false);
            for rank in &mut ranks {
                let mut values = [0.0; 2];
                rank.take(m, (0, true), &message, &mut values);
                rank.scatter(&heard, &values, 2, &mut [0.0; 8]).unwrap();
            }
            assert_eq!(ranks.each_ref().map(Bucket::holds_back), [expected; 2]);
        }

        // A text with a memory, and one without.
        for (text, expected) in [("topk(k=0.25)+ef(vanilla)", true), ("signsgd", false)] {
            let strategy = text.parse().unwrap();
            let mut ranks = [bucket(), bucket()];
            for (rank, gradient) in ranks.iter_mut().zip([gradient(1), zeros.clone()]) {
                let step = flexcomm_compression::pipeline::Step { index: 0, learning_rate: 1.0 };
                let member = flexcomm_compression::pipeline::Member::alone(7);
                let make = |index, params: &[Param], values: &[f32]| {
                    Piped::holding(index, &strategy, (crate::piped::layers(params)?, member), values)
                };
                rank.piped(make).unwrap().begin(&gradient, step);
                assert_eq!(rank.remembers(), expected, "{text}");
                rank.unpipe().unwrap();
            }
            assert_eq!(ranks.each_ref().map(Bucket::holds_back), [expected; 2], "{text}");
        }
    }

    #[test]
    fn a_failed_rank_is_named_everywhere() {
        let mut ranks = [bucket(), bucket()];
        let (messages, statuses) = pack(&mut ranks, &[gradient(1), vec![0.0; 3]]);
        assert!(statuses[1].failed && !statuses[0].failed);
        let heard = Heard { failed: 1, first_failed: Some(1), ..GOOD };
        let views: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
        for rank in &mut ranks {
            let error = rank.unpack(&heard, method(0.25), &views, &mut [0.0; 8]).unwrap_err().to_string();
            assert!(error.contains("rank 1 could not do its part"), "{error}");
        }
    }

    #[test]
    fn the_largest_energy_leads_and_the_lowest_among_equals() {
        let message = |energy: f64| [[0; 8], energy.to_le_bytes()].concat();
        let all = |energies: &[f64]| energies.iter().flat_map(|e| message(*e)).collect::<Vec<u8>>();
        assert_eq!(energies(&all(&[1.0, 3.0, 3.0])), 1);
        assert_eq!(energies(&all(&[f64::NEG_INFINITY, f64::NAN])), 0);
    }
}
