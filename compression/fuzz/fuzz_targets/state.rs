#![no_main]
mod shared;
use flexcomm_compression::Layers;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use libfuzzer_sys::fuzz_target;

const PARTS: [&str; 5] = ["", "+ef(vanilla)", "+ef(efsign)+nesterov(mu=0.5)", "+ef(dgc,mu=0.9)", "+ef(sgc,alpha=0.5)"];

fuzz_target!(|data: &[u8]| {
    let Some((codec, lengths, rest)) = shared::split(data) else { return };
    let Some((which, rest)) = rest.split_first() else { return };
    let text = format!("{codec}{}", PARTS[usize::from(*which) % PARTS.len()]);
    let layers = Layers::new(&lengths).expect("small");
    let n = layers.values();
    let mut pipeline = Pipeline::new(&text.parse().expect("a strategy"), layers, Member::alone(1));
    // The head of a true state, the rest of it from the fuzzer.
    let mut saved = Writer::new();
    pipeline.save(&mut saved);
    let head = 4 + 1 + 4 + pipeline.spec().to_string().len() + 4 + 16 * lengths.len() + 8;
    let state = [&saved.bytes()[..head], rest].concat();
    if pipeline.restore(&state).is_ok() {
        let mut again = Writer::new();
        pipeline.save(&mut again);
        assert_eq!(again.bytes(), state);
    }
    pipeline.save(&mut saved);
    if pipeline.restore(rest).is_err() {
        let mut again = Writer::new();
        pipeline.save(&mut again);
        assert_eq!(again, saved, "{text}: what was refused moved the state");
    }
    let (gradient, mut out) = (vec![0.5f32; n], Writer::new());
    let step = Step { index: 1, learning_rate: 0.1 };
    let _ = pipeline.compress(Gradient::F32(&gradient), step, &mut out);
});
