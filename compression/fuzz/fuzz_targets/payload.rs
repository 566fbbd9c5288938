#![no_main]
mod shared;
use flexcomm_compression::codec::Travels;
use flexcomm_compression::pipeline::{Member, Pipeline, add_messages};
use flexcomm_compression::wire::{DType, Header, Writer, write_message};
use flexcomm_compression::{Build, Layers};
use flexcomm_domain::spec::MAX_PARAMETERS;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((strategy, lengths, payload)) = shared::split(data) else { return };
    let layers = Layers::new(&lengths).expect("small");
    let n = layers.values();
    let mut pipeline = Pipeline::new(&strategy, layers, Member { seed: 1, rank: 0, world: 2, tensor: 0 });
    let values = strategy.values().all();
    let mut parameters = [0.0; MAX_PARAMETERS];
    parameters[..values.len()].copy_from_slice(values);
    let (method, round) = (strategy.entry().code, (pipeline.rounds() - 1) as u8);
    let header = Header {
        method,
        dtype: DType::F32,
        round,
        n: n as u64,
        count: values.len(),
        parameters,
        checksum: flexcomm_compression::Checksum::None,
        common: None,
    };
    let mut message = Writer::new();
    write_message(&header, &mut message, |out| {
        out.raw(payload);
        Ok(())
    })
    .expect("nothing refuses");
    let mut out = vec![0.0; n];
    if pipeline.decompress(message.bytes(), 3, &mut out).is_ok() {
        assert!(out.iter().all(|v| v.is_finite()), "{strategy}: {out:?}");
    }
    match pipeline.travels() {
        Travels::Sums(element) => {
            let mut sum = message.bytes().to_vec();
            if add_messages(element, &mut sum, message.bytes()).is_ok() {
                let _ = pipeline.mean(&sum, 3, &mut out);
            }
        }
        _ => {
            let _ = pipeline.aggregate(&[message.bytes(), message.bytes()], 3, &mut out);
        }
    }
});
