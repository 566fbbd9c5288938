//! Tensors as long as a training process has them: on a GPU all blocks that it has room for run, and go round several times.

use crate::data::{heavy_tails, long};
use crate::emulated::{Emulated, Memory, on_gpu};
use crate::{gains, hybrid, indices, quantize, three_lc, threshold, topk};
use flexcomm_compression::pipeline::Gradient;
use flexcomm_gpu_kernels::hybrid::{Qsparse, hard_threshold, qsparse};
use flexcomm_gpu_kernels::{DType, Device, Form, Random, Threshold};

/// A device and a gradient; None without a compiler for the emulator.
fn begin() -> Option<(Emulated, Vec<f32>)> {
    let device = Emulated::new(3)?;
    let (blocks, n) = (device.blocks("take"), long());
    assert!(!on_gpu() || blocks > 16, "{blocks} blocks: as few as the emulator has");
    Some((device, heavy_tails(n)))
}

#[test]
fn topk_of_a_long_tensor_is_the_cpus() {
    let Some((device, gradient)) = begin() else { return };
    let (n, source) = (gradient.len(), Memory::of(&gradient));
    for k in [n / 10, n / 100, n / 1000] {
        topk::check_two_steps(&device, k, (DType::F32, &source), Gradient::F32(&gradient), n);
    }
}

#[test]
fn gains_of_a_long_tensor_are_within_their_bounds() {
    let Some((device, gradient)) = begin() else { return };
    let ks = [0.1, 0.01, 0.001].map(|share| (gradient.len() as f64 * share) as u32);
    for (k, (gain, off)) in ks.iter().zip(gains::run(&device, &gradient, &ks)) {
        let want = gains::exact(&gradient, *k as usize);
        assert!((gain - want).abs() <= off && off < 0.009, "{k}: {gain} ± {off}, exactly {want}");
    }
}

#[test]
fn quantizers_of_a_long_tensor_are_the_cpus() {
    let Some((device, gradient)) = begin() else { return };
    let (n, source) = (gradient.len(), Memory::of(&gradient));
    for method in quantize::methods() {
        println!("{method:?}");
        quantize::check(&device, method, (DType::F32, &source), Gradient::F32(&gradient), n);
    }
}

#[test]
fn thresholds_of_a_long_tensor_are_the_cpus() {
    let Some((device, gradient)) = begin() else { return };
    let n = gradient.len();
    let (k, share) = ((n / 100) as u64, n / 100);
    let check = |text: &str, form, method: &dyn Fn(u64) -> Threshold| {
        threshold::check(&device, text, form, &gradient, method);
    };
    let random = threshold::random;
    check(&format!("mstopk(k={share})"), Form::FIXED, &|step| Threshold::MsTopK { k, random: random(step) });
    let dgc = |step| Threshold::Dgc { k, sample: 0.01, most: 1.3, random: random(step) };
    check(&format!("dgc(k={share},sample=0.01,most=1.3)"), Form::VARYING, &dgc);
    check("threshold(v=3)", Form::VARYING, &|_| Threshold::Above { v: 3.0 });
}

#[test]
fn random_k_of_a_long_tensor_is_the_cpus() {
    let Some((device, gradient)) = begin() else { return };
    let source = Memory::of(&gradient);
    for k in [gradient.len() / 10, gradient.len() / 1000] {
        indices::check_random_k(&device, (&gradient, &source), k, false);
    }
}

#[test]
fn hybrids_of_a_long_tensor_are_the_cpus() {
    let Some((device, gradient)) = begin() else { return };
    hybrid::check(&device, "hardthreshold(tau=3)", &gradient, |feedback, to, workspace, _| {
        hard_threshold(&device, feedback, 3.0, to, workspace)
    });
    let k = gradient.len() / 100;
    hybrid::check(&device, &format!("qsparse(k={k},s=15)"), &gradient, |feedback, to, workspace, step| {
        let random = Random { seed: 1, step, tensor: 0, rank: Some(0) };
        qsparse(&device, feedback, k as u64, Qsparse::Levels { s: 15, scaled: true, random }, to, workspace)
    });
}

#[test]
fn three_lc_of_a_long_tensor_is_the_cpus() {
    let Some((device, gradient)) = begin() else { return };
    three_lc::check(&device, 1.0, &gradient);
}
