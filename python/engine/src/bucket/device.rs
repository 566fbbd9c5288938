//! A bucket whose gradient lies on a GPU: what it holds back lies there too, its message is made there and all ranks'
//! messages are added up there. The bytes are those of the host: every rank may choose for itself, in every step, where it
//! works.
//!
//! Nothing here waits for the device but [`Bucket::come_home`]. So this rank's word is written before anybody knows
//! whether its gradient is finite; a kernel corrects the word.

use super::{Bucket, Ran};
use crate::error::EngineError;
use flexcomm_compression::{Checksum, Energy, HEADER_BYTES, Memory, Method, Part, Selection, encode};
use flexcomm_domain::{CompressionRatio, Compressor, Strategy};
use flexcomm_gpu_kernels::bucket as gpu;
use flexcomm_gpu_kernels::{
    At, Copies, LaunchError, OUTCOME_BYTES, Outcome, Random, Selected, Span, Threshold, add_mean,
};
use flexcomm_trainer::{Heard, NOT_FINITE, STATUS_AT};

/// Why a bucket that lies on a device is compressed on the host.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum OnHost {
    /// AR-Topk.
    #[error("{0} is exchanged through the host: its leader's indices are not made by kernels yet")]
    Exchange(Strategy),
    /// A compressor without kernels that fit a whole bucket.
    #[error("{0} of several layers in one bucket has no kernels yet")]
    Layers(Compressor),
    /// Not even an empty memory.
    #[error("it has no memory on the device")]
    Absent,
    /// Rank 0 announces a plan in front of this message: it takes another place than kernels can write to.
    #[error("a plan is announced in front of this message")]
    Place,
    /// The driver refused, or the memory is none that kernels can use.
    #[error("failed to {0}")]
    Launch(#[from] LaunchError),
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
