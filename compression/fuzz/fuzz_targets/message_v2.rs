#![no_main]
mod shared;
use flexcomm_compression::Layers;
use flexcomm_compression::methods::by_code;
use flexcomm_compression::pipeline::{Member, Pipeline};
use flexcomm_compression::wire::Envelope;
use flexcomm_domain::spec::CompressorSpec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(envelope) = Envelope::parse(data) else { return };
    let header = envelope.header;
    // A receiver has its own length; a claim above what it has is refused before anything is allocated.
    let n = header.n.min(4096) as usize;
    let Some(entry) = by_code(header.method) else { return };
    let Some(strategy) = CompressorSpec::from_numbers(entry.info, header.values()) else { return };
    let layers = Layers::new(&[n / 3, n - n / 3]).expect("small");
    let mut pipeline = Pipeline::new(&strategy, layers, Member::alone(1));
    let mut out = vec![0.0; n];
    if pipeline.decompress(data, 3, &mut out).is_ok() {
        assert!(out.iter().all(|v| v.is_finite()));
    }
    let _ = pipeline.mean(data, 3, &mut out);
    let _ = pipeline.aggregate(&[data, data], 3, &mut out);
});
