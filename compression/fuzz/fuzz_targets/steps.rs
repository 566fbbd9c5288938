#![no_main]
mod shared;
use flexcomm_compression::Layers;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use libfuzzer_sys::fuzz_target;

const PARTS: [&str; 4] = ["+ef(vanilla)", "+ef(vanilla)+scope(tensor)", "+ef(dgc,mu=0)", "+ef(efsign)+scope(bucket)"];

/// Runs every round; with one rank the message is also the sum.
fn run(pipeline: &mut Pipeline, gradient: &[f32], index: u64, out: &mut Writer) -> bool {
    let step = Step { index, learning_rate: 0.25 };
    let mut outcome = match pipeline.compress(Gradient::F32(gradient), step, out) {
        Ok(outcome) => outcome,
        Err(_) => return false,
    };
    while outcome.more {
        let sum = out.bytes().to_vec();
        match pipeline.advance(&sum, out) {
            Ok(next) => outcome = next,
            Err(_) => return false,
        }
    }
    true
}

fuzz_target!(|data: &[u8]| {
    let Some((codec, lengths, rest)) = shared::split(data) else { return };
    let Some((which, rest)) = rest.split_first() else { return };
    let which = *which;
    let text = format!("{codec}{}", PARTS[usize::from(which) % PARTS.len()]);
    let layers = Layers::new(&lengths).expect("small");
    let n = layers.values();
    let mut pipeline = Pipeline::new(&text.parse().expect("a strategy"), layers, Member::alone(1));
    let (mut out, mut before, mut after) = (Writer::new(), Writer::new(), Writer::new());
    let mut mean = vec![0.0f32; n];
    let values: Vec<f32> = rest.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    for (index, part) in values.chunks(n.max(1)).take(8).enumerate() {
        let gradient: Vec<f32> = (0..n).map(|i| part.get(i).copied().unwrap_or(0.5)).collect();
        pipeline.save(&mut before);
        let held = pipeline.held_back();
        if !run(&mut pipeline, &gradient, index as u64, &mut out) {
            pipeline.save(&mut after);
            // The learning rate of the refused step may be noted; nothing else may move. It is the same in every step.
            assert!(index == 0 || before.bytes() == after.bytes(), "{text}: a refused step moved the state");
            continue;
        }
        let decoded = pipeline.decompress(out.bytes(), index as u64, &mut mean);
        let left = pipeline.held_back();
        // At the edge of f32's range, units of gradients may lie beyond it.
        if which % 4 == 3 && (decoded.is_err() || held.iter().chain(&left).any(|v| !v.is_finite())) {
            continue;
        }
        decoded.expect("its own message");
        for i in 0..n {
            let came = f64::from(gradient[i]) + f64::from(held.get(i).copied().unwrap_or(0.0));
            let off = (f64::from(mean[i]) + f64::from(left[i]) - came).abs();
            let largest = [gradient[i], mean[i], left[i], held.get(i).copied().unwrap_or(0.0)];
            let largest = largest.iter().fold(0.0f64, |max, v| max.max(f64::from(v.abs())));
            assert!(off <= 1e-5 * largest + 1e-43, "{text}: value {i} is off by {off}");
        }
    }
});
