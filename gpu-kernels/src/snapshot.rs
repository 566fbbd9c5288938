//! Trials with checkpoint and restore in memory: where a snapshot of a training process's tensors goes, whether it fits, and
//! the copies there and back, which are bit for bit. Device memory first; what does not fit there goes to pinned memory of
//! the host. A tensor may lie in both.

use crate::{Allocation, Device, Gpu, LaunchError, MemoryError, Pinned, Span};

/// Bytes that a snapshot may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Free {
    /// Of the device.
    pub device: u64,
    /// Of the host, pinned.
    pub host: u64,
}

/// Failed to take or restore a snapshot.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SnapshotError {
    /// It does not fit.
    #[error(
        "keep a snapshot of {needed} bytes: {} may be used on the device and {} of the host's memory, {} bytes too few; \
         free some (torch.cuda.empty_cache(), a smaller batch, fewer processes per host), or use shadow trials, which need \
         no snapshot", free.device, free.host, needed.saturating_sub(free.device + free.host)
    )]
    DoesNotFit {
        /// Of all tensors, each rounded up to 256 bytes.
        needed: u64,
        /// What there was, in whole multiples of 256 bytes.
        free: Free,
    },
    /// The tensors are not those that it was planned for.
    #[error("copy a snapshot of {planned:?} bytes in tensor {tensor}: it has {got:?} now; plan again")]
    Changed {
        /// Which one.
        tensor: usize,
        /// Bytes when it was planned.
        planned: Option<u64>,
        /// Bytes now.
        got: Option<u64>,
    },
    /// Memory for it.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A copy.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

/// Where a stretch of a tensor is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kept {
    tensor: usize,
    /// Within the tensor.
    from: u64,
    bytes: u64,
    on_device: bool,
    /// Within that memory.
    at: u64,
}

/// Where all tensors of a snapshot go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    tensors: Vec<u64>,
    kept: Vec<Kept>,
    needs: Free,
}

/// Stretches begin at multiples of this, at which copies are fastest.
const ALIGN: u64 = 256;

impl Plan {
    /// For tensors of so many bytes each.
    pub fn new(tensors: &[u64], free: Free) -> Result<Self, SnapshotError> {
        let whole = |bytes: u64| bytes / ALIGN * ALIGN;
        let free = Free { device: whole(free.device), host: whole(free.host) };
        let padded = |bytes: &u64| bytes.checked_next_multiple_of(ALIGN);
        let needed = tensors.iter().try_fold(0u64, |sum, bytes| sum.checked_add(padded(bytes)?)).unwrap_or(u64::MAX);
        if needed > free.device.saturating_add(free.host) {
            return Err(SnapshotError::DoesNotFit { needed, free });
        }
        let (mut kept, mut at) = (Vec::with_capacity(tensors.len() + 1), 0u64);
        for (tensor, bytes) in tensors.iter().enumerate() {
            let first = (*bytes).min(free.device.saturating_sub(at));
            kept.push(Kept { tensor, from: 0, bytes: first, on_device: true, at });
            let host = (at + first).saturating_sub(free.device);
            let rest = Kept { tensor, from: first, bytes: bytes - first, on_device: false, at: host };
            kept.push(rest);
            at += bytes.next_multiple_of(ALIGN);
        }
        kept.retain(|kept| kept.bytes > 0);
        let device = at.min(free.device);
        Ok(Self { tensors: tensors.to_vec(), kept, needs: Free { device, host: at - device } })
    }

    /// Bytes that it takes on the device and on the host: with what training takes anyhow, the peak of a trial.
    pub fn needs(&self) -> Free {
        self.needs
    }

    /// Queues copies of all tensors into memory of the device and of the host, of at least [`Plan::needs`].
    pub fn save(&self, device: &impl Device, tensors: &[Span], to: (Span, Span)) -> Result<(), SnapshotError> {
        self.each(tensors, to, |tensor, kept| device.copy(kept, tensor))
    }

    /// Queues copies back.
    pub fn restore(&self, device: &impl Device, tensors: &[Span], from: (Span, Span)) -> Result<(), SnapshotError> {
        self.each(tensors, from, |tensor, kept| device.copy(tensor, kept))
    }

    fn each(
        &self,
        tensors: &[Span],
        (device, host): (Span, Span),
        copy: impl Fn(Span, Span) -> Result<(), LaunchError>,
    ) -> Result<(), SnapshotError> {
        for tensor in 0..self.tensors.len().max(tensors.len()) {
            let (planned, got) = (self.tensors.get(tensor).copied(), tensors.get(tensor).map(|span| span.bytes()));
            if planned != got {
                return Err(SnapshotError::Changed { tensor, planned, got });
            }
        }
        for (what, span, need) in
            [("the device's part", device, self.needs.device), ("the host's", host, self.needs.host)]
        {
            if span.bytes() < need {
                return Err(LaunchError::TooSmall { what, got: span.bytes(), need }.into());
            }
        }
        for kept in &self.kept {
            let memory = if kept.on_device { device } else { host };
            copy(tensors[kept.tensor].part(kept.from, kept.bytes), memory.part(kept.at, kept.bytes))?;
        }
        Ok(())
    }
}

/// A snapshot with its memory, allocated once before the first trial and used by all.
#[derive(Debug)]
pub struct Snapshot<'a> {
    plan: Plan,
    device: Option<Allocation<'a>>,
    host: Option<Pinned<'a>>,
}

impl Gpu {
    /// Room for a snapshot of tensors of so many bytes each, in what is free now.
    pub fn snapshot(&self, tensors: &[u64]) -> Result<Snapshot<'_>, SnapshotError> {
        let plan = Plan::new(tensors, self.free()?)?;
        let Free { device, host } = plan.needs();
        let device = if device > 0 { Some(self.allocate(device)?) } else { None };
        let host = if host > 0 { Some(self.pin(host)?) } else { None };
        Ok(Snapshot { plan, device, host })
    }
}

impl Snapshot<'_> {
    /// Where it lies.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    fn memory(&self) -> (Span, Span) {
        let device = self.device.as_ref().map_or(Span::NONE, Allocation::span);
        (device, self.host.as_ref().map_or(Span::NONE, Pinned::span))
    }

    /// Queues the copies on the device's stream: training may go on there at once.
    pub fn save(&self, device: &impl Device, tensors: &[Span]) -> Result<(), SnapshotError> {
        self.plan.save(device, tensors, self.memory())
    }

    /// Queues the copies back. Drop the snapshot only after the stream has done them.
    pub fn restore(&self, device: &impl Device, tensors: &[Span]) -> Result<(), SnapshotError> {
        self.plan.restore(device, tensors, self.memory())
    }
}
