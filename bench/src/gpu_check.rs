//! Before `flexcomm bench gpu` times anything: the kernels' messages and memories are the CPU's, byte for byte.

use anyhow::{Context, Result, bail, ensure};
use flexcomm_compression::Build;
use flexcomm_compression::codec::{self, Shape};
use flexcomm_compression::wire::Writer;
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_gpu_kernels::bench::{Bench, GainOfK, Message};

/// Lengths at which results are compared: part of a tile, some blocks, all blocks that a device has room for. Multiples of
/// 1000, of which every ratio is a whole number.
const SAMPLES: [usize; 3] = [4000, 123_000, 2_500_000];

/// Those of a run over tensors of up to `most` values.
pub fn samples(most: usize) -> Vec<usize> {
    let within: Vec<usize> = SAMPLES.into_iter().filter(|n| *n <= most).collect();
    if within.is_empty() { vec![(most / 1000).max(1) * 1000] } else { within }
}

/// Compares every message with the CPU's, and gains with exact ones; answers how many methods were compared.
pub fn check(bench: &Bench, values: &[f32]) -> Result<usize> {
    let messages = bench.messages(values)?;
    for message in &messages {
        compare(message, values)
            .with_context(|| format!("{} of {} values: the GPU and the CPU differ", message.method, values.len()))?;
    }
    for GainOfK { k, gain, error } in bench.gains(values)? {
        let exact = exact_gain(values, k as usize);
        ensure!((gain - exact).abs() <= error, "the gain of the {k} largest is {gain} ± {error}, but exactly {exact}");
    }
    Ok(messages.len())
}

fn compare(message: &Message, values: &[f32]) -> Result<()> {
    // AR-Topk's values at agreed indices, which here are those that random-k has drawn before.
    let method = message.method.replace("agreed", "randomk");
    let strategy: CompressorSpec = format!("{method}+ef(vanilla)").parse()?;
    // The codec alone: what a pipeline scales it leaves to the host.
    let (mut residual, mut want) = (values.to_vec(), Writer::new());
    let context = codec::Context { world: message.world, ..codec::Context::new(1) };
    strategy.codec(Shape::vector(values.len())).encode_taking(&mut residual, &context, &mut want)?;
    let (want, got) = (want.bytes(), &message.bytes[..]);
    ensure!(want.len() == got.len(), "a message of {} bytes, {} by the CPU", got.len(), want.len());
    if let Some(at) = want.iter().zip(got).position(|(a, b)| a != b) {
        bail!("byte {at} of {} of the message", want.len());
    }
    let kept = &message.residual;
    if let Some(at) = residual.iter().zip(kept).position(|(a, b)| a.to_bits() != b.to_bits()) {
        bail!("value {at} of the memory is {}, {} by the CPU", kept[at], residual[at]);
    }
    Ok(())
}

/// Share of the energy in the k largest.
fn exact_gain(values: &[f32], k: usize) -> f64 {
    let mut squares: Vec<f64> = values.iter().map(|x| f64::from(*x) * f64::from(*x)).collect();
    squares.sort_by(|a, b| b.total_cmp(a));
    let all: f64 = squares.iter().sum();
    if all > 0.0 { squares[..k.min(values.len())].iter().sum::<f64>() / all } else { 1.0 }
}

#[cfg(test)]
#[path = "../../tests/skipped.rs"]
mod skipped;

#[cfg(test)]
mod tests {
    use super::super::data::{DType, Distribution};
    use super::skipped::skipped;
    use super::*;
    use flexcomm_gpu_kernels::in_environment;
    use std::path::Path;
    use std::process::Command;

    #[test]
    fn lengths_are_those_of_the_run() {
        assert_eq!(samples(100_000_000), SAMPLES);
        assert_eq!([samples(200_000), samples(3999), samples(10)], [vec![4000, 123_000], vec![3000], vec![1000]]);
    }

    /// Signs of values without a fraction, by hand.
    #[test]
    fn another_byte_and_another_memory_are_found() {
        let values: Vec<f32> = (0..1000).map(|i| if i % 3 == 0 { -1.0 } else { 1.0 }).collect();
        let mut bytes = vec![0u8; 125];
        (0..1000).step_by(3).for_each(|i| bytes[i / 8] |= 1 << (i % 8));
        let good = Message { method: "signsgd".into(), world: 1, bytes, residual: vec![0.0; 1000] };
        compare(&good, &values).unwrap();
        let mut other = good.clone();
        other.bytes[77] ^= 4;
        assert!(format!("{:#}", compare(&other, &values).unwrap_err()).contains("byte 77 of 125"));
        let mut other = good.clone();
        other.bytes.pop();
        assert!(format!("{:#}", compare(&other, &values).unwrap_err()).contains("124 bytes, 125 by the CPU"));
        let mut other = good;
        other.residual[5] = 1e-30;
        assert!(format!("{:#}", compare(&other, &values).unwrap_err()).contains("value 5 of the memory"));
    }

    #[test]
    fn gains_are_shares_of_energy() {
        assert_eq!([exact_gain(&[3.0, -4.0], 1), exact_gain(&[0.0], 1), exact_gain(&[1.0], 9)], [0.64, 1.0, 1.0]);
    }

    /// Every method over the stand-in for the driver that the kernels' tests have, which runs their own source: in a process of
    /// its own, with NVRTC of the wheel that `./dev test` installs.
    #[test]
    fn on_a_stand_in_for_a_gpu_every_message_is_the_cpus() {
        if std::env::var_os("STANDIN_COMPILES").is_some() {
            let bench = Bench::new(0).unwrap();
            let values = Distribution::Recorded.values(4000, DType::Fp32);
            let methods = check(&bench, &values).unwrap_or_else(|why| panic!("{why:#}"));
            assert_eq!(methods, bench.rows(&values, None).unwrap().len() - 3, "but copy, read and gains");
            return;
        }
        let (root, folder) = (Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), tempfile::tempdir().unwrap());
        let source = root.join("gpu-kernels/tests/emulator");
        let flags = "-std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -shared -fPIC -DFLEXCOMM_EMULATOR";
        let mut compiler = Command::new("g++");
        compiler.args(flags.split(' ')).arg("-I").arg(root.join("gpu-kernels/cuda")).arg("-I").arg(&source);
        compiler.arg(source.join("driver.cpp")).arg("-o").arg(folder.path().join("libcuda.so.1"));
        let built = compiler.status();
        let venvs = ["venv-nvrtc", "venv-python"].map(|venv| root.join("target").join(venv));
        let nvrtc = venvs.iter().find_map(|venv| in_environment(venv).into_iter().next());
        let (Ok(status), Some(nvrtc)) = (built, nvrtc) else {
            return skipped("no g++, or no NVRTC in target/venv-nvrtc: ./dev test installs both");
        };
        assert!(status.success());
        let mut again = Command::new(std::env::current_exe().unwrap());
        again.args(["gpu_check::tests::on_a_stand_in_for_a_gpu_every_message_is_the_cpus", "--exact"]);
        again.env("LD_LIBRARY_PATH", folder.path()).env("FLEXCOMM_NVRTC", nvrtc).env("STANDIN_COMPILES", "1");
        let done = again.env("FLEXCOMM_KERNEL_CACHE", folder.path().join("cubins")).output().unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success() && said.contains("1 passed"), "{said}");
    }
}
