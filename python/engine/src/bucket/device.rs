//! A bucket whose gradient lies on a GPU: what it holds back lies there too, its message is made there and all ranks'
//! messages are added up there. The bytes are those of the host: every rank may choose for itself, in every step, where it
//! works.
//!
//! Nothing here waits for the device but [`Bucket::come_home`]. So this rank's word is written before anybody knows
//! whether its gradient is finite; a kernel corrects the word.

use super::{Bucket, Exchange, Ran};
use crate::error::EngineError;
use flexcomm_compression::Compressor;
use flexcomm_compression::{Checksum, Energy, HEADER_BYTES, Memory, Method, Part, Selection, encode};
use flexcomm_domain::{CompressionRatio, Strategy};
use flexcomm_gpu_kernels::bucket as gpu;
use flexcomm_gpu_kernels::{
    At, Copies, LaunchError, OUTCOME_BYTES, Outcome, Random, Selected, Span, Threshold, add_mean,
};
use flexcomm_trainer::{Heard, NOT_FINITE, STATUS_AT, Status};

/// Why a bucket that lies on a device is compressed on the host.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum OnHost {
    /// AR-Topk of another selection than top-k.
    #[error("{0} is exchanged through the host: kernels choose a leader's indices by top-k alone")]
    Exchange(Box<Strategy>),
    /// A compressor without kernels that fit a whole bucket.
    #[error("{0} of several layers in one bucket has no kernels yet")]
    Layers(Compressor),
    /// A text whose parts have no kernels that fit together.
    #[error("{0} has no kernels yet for all of its parts")]
    Text(String),
    /// Not even an empty memory.
    #[error("it has no memory on the device")]
    Absent,
    /// Rank 0 announces a plan in front of this message: it takes another place than kernels can write to.
    #[error("a plan is announced in front of this message")]
    Place,
    /// An unbiased compressor's message has to be scaled.
    #[error(
        "the variance that its compressor adds has grown so large that its messages are scaled, which no kernel does"
    )]
    Variance,
    /// The driver refused, or the memory is none that kernels can use.
    #[error("failed to {0}")]
    Launch(#[from] LaunchError),
}

/// Whether kernels choose the indices of an AR-Topk strategy.
pub fn chooses(strategy: &Strategy) -> Result<(), OnHost> {
    match Method::of(strategy).map(|method| method.compressor) {
        Some(Compressor::TopK) => Ok(()),
        _ => Err(OnHost::Exchange((*strategy).into())),
    }
}

/// The kernels of a method that is gathered, for a bucket of so many layers. `seed` is MSTopk's only randomness.
pub fn kernels(method: Method, (layers, k): (usize, usize), seed: u64) -> Result<gpu::Method, OnHost> {
    let k = k as u64;
    match method.compressor {
        Compressor::TopK => Ok(gpu::Method::TopK(k)),
        Compressor::LwTopK if layers <= 1 => Ok(gpu::Method::TopK(k)),
        Compressor::MsTopK => {
            let random = Random { seed, step: 0, tensor: 0, rank: None };
            Ok(gpu::Method::Threshold(Threshold::MsTopK { k, random }))
        }
        Compressor::LwTopK | Compressor::None => Err(OnHost::Layers(method.compressor)),
    }
}

/// Whoever lent a bucket's memory on the device, and keeps it allocated while this lives.
pub trait Home: std::fmt::Debug + Send {
    /// Copies to the host, after all that was launched.
    fn fetch(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError>;
}

/// A bucket's part that lies on a device.
#[derive(Debug)]
pub(super) struct Resident {
    bucket: gpu::Bucket,
    home: Box<dyn Home>,
    /// Of every message of this method.
    header: (Method, Vec<u8>),
    /// A message was made that may yet be put back.
    under_way: bool,
}

/// What all ranks have said about a bucket, copied from the device when the collective was over.
#[derive(Debug, Clone, Copy)]
pub struct Answers<'a> {
    /// From the words.
    pub heard: &'a Heard,
    /// Of every rank's message, in rank order.
    pub headers: &'a [&'a [u8]],
    /// [`Bucket::outcome_on_device`] of this rank.
    pub outcome: &'a [u8; OUTCOME_BYTES as usize],
}

/// Word, header, indices, values: the block that is gathered.
fn lists(block: Span, front: usize, k: u64) -> (Span, Span) {
    let lists = block.part(front as u64, 8 * k);
    (lists.part(0, 4 * k), lists.part(4 * k, 4 * k))
}

/// Indices, then values.
fn pair(lists: Span, k: u64) -> At {
    At { k, indices: lists.part(0, 4 * k), values: lists.part(4 * k, 4 * k) }
}

/// Waits.
fn fetch_outcome(device: &impl Copies, from: Span) -> Result<Outcome, LaunchError> {
    let mut bytes = [0; OUTCOME_BYTES as usize];
    device.download(from, &mut bytes)?;
    Ok(Outcome::read(&bytes))
}

fn fetch_indices(device: &impl Copies, from: Span, to: &mut Vec<u32>) -> Result<(), LaunchError> {
    let mut bytes = vec![0; from.bytes() as usize];
    device.download(from, &mut bytes)?;
    to.clear();
    to.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)));
    Ok(())
}

fn fetch_values(device: &impl Copies, from: Span, to: &mut [f32]) -> Result<(), LaunchError> {
    let mut bytes = vec![0; from.bytes() as usize];
    device.download(from, &mut bytes)?;
    to.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(to, bytes)| *to = f32::from_le_bytes(*bytes));
    Ok(())
}

impl Bucket {
    /// Bytes of device memory that it needs lent there, aligned to 256.
    pub fn lent_bytes(&self) -> Result<u64, LaunchError> {
        gpu::Bucket::bytes(self.values() as u64, &[])
    }

    /// Whether what it holds back lies on a device.
    pub fn is_resident(&self) -> bool {
        self.resident.is_some()
    }

    /// Moves what is held back to the device, into memory that `home` lends.
    pub fn reside(&mut self, device: &impl Copies, (home, lent): (Box<dyn Home>, Span)) -> Result<(), EngineError> {
        self.come_home()?;
        let bucket = gpu::Bucket::new(device, (self.values() as u64, &[]), lent)?;
        if self.holds_back {
            let bytes: Vec<u8> = self.compressor.residual().iter().flat_map(|value| value.to_le_bytes()).collect();
            device.upload(bucket.held_back(), &bytes)?;
        }
        let none = Method::new(Compressor::None, CompressionRatio::DENSE);
        self.resident = Some(Resident { bucket, home, header: (none, Vec::new()), under_way: false });
        Ok(())
    }

    /// Moves what is held back to the host: for everything that no kernel does. Waits for the device.
    pub fn come_home(&mut self) -> Result<(), EngineError> {
        self.abandon_on_device();
        for piped in self.piped.iter_mut().chain(self.parked.iter_mut().flatten()) {
            piped.come_home()?;
        }
        let Some(resident) = &self.resident else { return Ok(()) };
        let mut bytes = vec![0; 4 * self.values()];
        resident.home.fetch(resident.bucket.held_back(), &mut bytes)?;
        let values = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        self.compressor.restore(&Memory::from_values(values))?;
        self.resident = None;
        Ok(())
    }

    /// A message that was made and never judged (an exception came in between) does not count.
    pub(super) fn abandon_on_device(&mut self) {
        if let Some(piped) = &mut self.piped {
            piped.abandon_on_device();
        }
        if let Some(resident) = self.resident.as_mut().filter(|resident| resident.under_way) {
            resident.under_way = false;
            resident.bucket.put_back();
        }
    }

    fn on_device(&mut self) -> Result<&mut Resident, EngineError> {
        let missing = EngineError::Order { bucket: self.index, what: "it does not lie on a device" };
        self.resident.as_mut().ok_or(missing)
    }

    /// The header of messages of this method: without a checksum it says nothing of the values.
    fn header(&mut self, method: Method) -> Result<&[u8], OnHost> {
        let (n, k) = (self.values(), self.kept(method));
        let resident = self.resident.as_mut().ok_or(OnHost::Absent)?;
        if resident.header.0 != method {
            let any = Selection::new(n, (0..k as u32).collect(), vec![0.0; k]).unwrap_or_default();
            let mut message = Vec::new();
            encode(method.compressor, &any, Part::Whole, Checksum::None, &mut message);
            message.truncate(HEADER_BYTES);
            resident.header = (method, message);
        }
        Ok(&resident.header.1)
    }

    /// Allgather, first half: writes the block (the word, whose status is corrected where the gradient is not finite, and
    /// the message) on the device. Where it fails, what is held back is as before, and the host can do it instead.
    pub fn pack_on(
        &mut self,
        device: &impl Copies,
        (method, seed): (Method, u64),
        gradient: gpu::Gradient,
        (block, word): (Span, &[u8]),
    ) -> Result<(), OnHost> {
        let (k, layers) = (self.kept(method), self.params.len());
        let kernels = kernels(method, (layers, k), seed)?;
        let front = [word, self.header(method)?].concat();
        if !front.len().is_multiple_of(4) {
            return Err(OnHost::Place);
        }
        let (indices, values) = lists(block, front.len(), k as u64);
        let to = Selected { indices, values, room: k as u64 };
        let Some(resident) = &mut self.resident else { return Err(OnHost::Absent) };
        resident.bucket.select(device, gradient, (kernels, &to))?;
        resident.under_way = true;
        let said = device.upload(block.part(0, front.len() as u64), &front);
        let said = said.and_then(|()| resident.bucket.mark(device, block.part(STATUS_AT as u64, 1), NOT_FINITE));
        if let Err(error) = said {
            self.abandon_on_device();
            return Err(error.into());
        }
        Ok(())
    }

    /// AR-Topk, first half, as [`Self::choose`]: error feedback on the device and, where this rank may lead, its selection, whose
    /// indices are fetched: here the host waits. `lists` has [`Self::list_bytes`].
    pub fn choose_on(
        &mut self,
        device: &impl Copies,
        (method, may_lead): (Method, bool),
        gradient: gpu::Gradient,
        lists: Span,
    ) -> Result<Status, OnHost> {
        let (n, k) = (self.values(), self.kept(method));
        let Some(resident) = &mut self.resident else { return Err(OnHost::Absent) };
        let at = pair(lists, k as u64);
        match may_lead {
            true => {
                let to = Selected { indices: at.indices, values: at.values, room: k as u64 };
                resident.bucket.choose(device, gradient, (k as u64, &to))?;
            }
            false => resident.bucket.feed_alone(device, gradient)?,
        }
        let outcome = fetch_outcome(device, resident.bucket.outcome())?;
        if may_lead && !outcome.refused {
            fetch_indices(device, at.indices, &mut self.indices)?;
            let selection = Selection::new(n, self.indices.clone(), vec![0.0; k]).unwrap_or_default();
            encode(method.compressor, &selection, Part::Indices, Checksum::None, &mut self.scratch);
        }
        self.fault.clear();
        self.state = Exchange::Selected;
        self.energy = Energy { sent: if may_lead { outcome.sent } else { 0.0 }, fed: outcome.fed };
        self.status = Status { not_finite: outcome.refused, ..Status::default() };
        Ok(self.status)
    }

    /// Bytes on the device for the lists of AR-Topk.
    pub fn list_bytes(&self, method: Method) -> u64 {
        8 * self.kept(method) as u64
    }

    /// AR-Topk, as [`Self::take`], of what [`Self::choose_on`] fed.
    pub fn take_on(
        &mut self,
        device: &impl Copies,
        (method, leader): (Method, (usize, bool)),
        message: &[u8],
        (lists, values): (Span, &mut [f32]),
    ) -> Status {
        values.fill(0.0);
        if self.status != Status::default() || !leader.1 {
            return self.status;
        }
        if let Err(error) = self.take_lists(device, (method, leader.0), message, (lists, values)) {
            self.status = self.failed(&error);
            values.fill(0.0);
        }
        self.status
    }

    fn take_lists(
        &mut self,
        device: &impl Copies,
        (method, leader): (Method, usize),
        message: &[u8],
        (lists, values): (Span, &mut [f32]),
    ) -> Result<(), EngineError> {
        let mut indices = std::mem::take(&mut self.indices);
        self.parse(leader, message, method)?.indices_into(&mut indices);
        self.indices = indices;
        let (got, expected) = (values.len(), self.indices.len());
        if got != expected {
            return Err(EngineError::Buffer { bucket: self.index, what: "the values", got, expected });
        }
        let at = pair(lists, expected as u64);
        let bytes: Vec<u8> = self.indices.iter().flat_map(|index| index.to_le_bytes()).collect();
        device.upload(at.indices, &bytes)?;
        let resident = self.on_device()?;
        resident.bucket.take_at(device, &at)?;
        resident.under_way = true;
        let outcome = fetch_outcome(device, self.on_device()?.bucket.outcome())?;
        fetch_values(device, at.values, values)?;
        self.energy = Energy { sent: outcome.sent, fed: outcome.fed };
        self.state = Exchange::Taken;
        Ok(())
    }

    /// AR-Topk, last, as [`Self::scatter`]: `out` (f32, on the device) becomes the mean at the indices that were taken. Where some
    /// rank's gradient was not finite, `out` is not written.
    pub fn scatter_on(
        &mut self,
        device: &impl Copies,
        (heard, sums, world): (&Heard, &[f32], u32),
        (lists, out): (Span, Span),
    ) -> Result<Ran, EngineError> {
        let state = std::mem::replace(&mut self.state, Exchange::Idle);
        if !heard.good() {
            self.abandon_on_device();
            self.energy = Energy::default();
            return match heard.failed {
                0 => Ok(Ran::NotFinite),
                _ => Err(EngineError::peer(self.index, heard, &self.fault)),
            };
        }
        if state != Exchange::Taken {
            return Err(EngineError::Order { bucket: self.index, what: "no values were taken" });
        }
        let (n, at) = (self.values() as u64, pair(lists, sums.len() as u64));
        let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        device.upload(at.values, &bytes)?;
        device.zero(out)?;
        add_mean(device, &at, (n, out), world)?;
        self.on_device()?.under_way = false;
        self.holds_back = true;
        Ok(Ran::Good)
    }

    /// [`Outcome`] of the last message, to copy back with all ranks' words.
    pub fn outcome_on_device(&mut self) -> Result<Span, EngineError> {
        Ok(self.on_device()?.bucket.outcome())
    }

    /// Allgather, second half, launched before anybody knows what the ranks said: `out` (f32) becomes the mean of the
    /// messages in `world` blocks behind words of `word` bytes. What it means is [`Self::judge`]'s to say.
    pub fn add_on(
        &self,
        device: &impl Copies,
        (method, world, word): (Method, u32, usize),
        (blocks, out): (Span, Span),
    ) -> Result<(), EngineError> {
        let (n, k) = (self.values() as u64, self.kept(method) as u64);
        let each = blocks.bytes() / u64::from(world.max(1));
        device.zero(out)?;
        for rank in 0..u64::from(world) {
            let (indices, values) = lists(blocks.part(rank * each, each), word + HEADER_BYTES, k);
            add_mean(device, &At { k, indices, values }, (n, out), world)?;
        }
        Ok(())
    }

    /// Allgather, at last: whether what [`Self::add_on`] left is the mean gradient. If not, what is held back is as before.
    pub fn judge(&mut self, said: Answers<'_>) -> Result<Ran, EngineError> {
        let index = self.index;
        let resident = self.on_device()?;
        if !resident.under_way {
            return Err(EngineError::Order { bucket: index, what: "no message was made on the device" });
        }
        let foreign = said.headers.iter().position(|other| *other != resident.header.1);
        if !said.heard.good() || foreign.is_some() {
            self.abandon_on_device();
        }
        if said.heard.failed > 0 {
            return Err(EngineError::peer(index, said.heard, ""));
        }
        if !said.heard.good() {
            return Ok(Ran::NotFinite);
        }
        if let Some(rank) = foreign {
            return Err(EngineError::Header { rank });
        }
        let outcome = Outcome::read(said.outcome);
        self.energy = Energy { sent: outcome.sent, fed: outcome.fed };
        self.holds_back = true;
        self.on_device()?.under_way = false;
        Ok(Ran::Good)
    }
}
