#![no_main]
mod shared;
use flexcomm_compression::Layers;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use libfuzzer_sys::fuzz_target;

const PARTS: [&str; 4] = ["+ef(vanilla)", "+ef(vanilla)+scope(tensor)", "+ef(dgc,mu=0)", "+ef(efsign)+scope(bucket)"];

/// Powers of two: no rounding of their ratios.
const RATES: [f64; 3] = [0.25, 0.5, 0.125];

/// Runs every round; with one rank the message is also the sum.
fn run(pipeline: &mut Pipeline, gradient: &[f32], step: Step, out: &mut Writer) -> bool {
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
        let step = Step { index: index as u64, learning_rate: RATES[index % RATES.len()] };
        // DGC's memory alone keeps a residual of gradients of any rate.
        let ratio = if which % 4 == 2 { 1.0 } else { pipeline.learning_rate() / step.learning_rate };
        let residual: Vec<f64> = pipeline.residual().iter().map(|residual| ratio * f64::from(*residual)).collect();
        if !run(&mut pipeline, &gradient, step, &mut out) {
            pipeline.save(&mut after);
            assert!(before.bytes() == after.bytes(), "{text}: a refused step moved the state");
            continue;
        }
        let decoded = pipeline.decompress(out.bytes(), index as u64, &mut mean);
        let left = pipeline.residual();
        // At the edge of f32's range, units of gradients may lie beyond it.
        let finite = residual.iter().all(|v| v.is_finite()) && left.iter().all(|v| v.is_finite());
        if which % 4 == 3 && (decoded.is_err() || !finite) {
            continue;
        }
        decoded.expect("its own message");
        for i in 0..n {
            let residual = residual.get(i).copied().unwrap_or(0.0);
            let came = f64::from(gradient[i]) + residual;
            let off = (f64::from(mean[i]) + f64::from(left[i]) - came).abs();
            let largest = [gradient[i], mean[i], left[i]].iter().fold(residual.abs(), |max, v| max.max(f64::from(v.abs())));
            assert!(off <= 1e-5 * largest + 1e-43, "{text}: value {i} is off by {off}");
        }
    }
});
