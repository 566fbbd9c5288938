//! What this worker says of itself.

use flexcomm_compression::{Layers, Sizes};
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_domain::{Collective, JobId, Rank, default_compressors, further_compressors};
use flexcomm_wire::{CodecInfo, Hello};

/// What moves the bytes.
pub const BACKEND: &str = "lab-tcp";

/// What this worker is, for its agent.
pub fn hello(job: &JobId, rank: Rank, world: usize, layers: &Layers) -> Hello {
    let codec = |family, on_request| CodecInfo { on_request, ..CodecInfo::new(family, Sizes::codec(family, layers)) };
    let candidates = std::iter::once(CompressorSpec::NONE.into()).chain(default_compressors());
    let further = further_compressors().into_iter().map(|family| codec(family, true));
    Hello {
        machine: flexcomm_trainer::processor(),
        codecs: candidates.map(|family| codec(family, false)).chain(further).collect(),
        collectives: Collective::ALL.iter().map(ToString::to_string).collect(),
        ..Hello::new(job.clone(), (rank.0, world as u32), layers.values() as u64, BACKEND)
    }
}
