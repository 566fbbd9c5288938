//! Parameters for a table: of methods whose first example would send nothing or everything of a gradient, those that send
//! about 1 % of it.

use super::measure::{LESSONS, MORE, shifted};
use anyhow::{Result, anyhow, bail};
use flexcomm_compression::Layers;
use flexcomm_compression::entry::Entry;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::Writer;

/// The share of the values that is to be sent.
const SHARE: f64 = 0.01;

/// Values that a quantile is taken from, at most.
const QUANTILE: usize = 1 << 20;

/// Values that variance-based steps are tried on, at most.
const TRIED: usize = 1 << 16;

/// Steps that are counted after those that teach.
const COUNTED: usize = 24;

/// Methods whose parameter has the unit of the values, or depends on their course.
pub fn is_fitted(name: &str) -> bool {
    ["threshold", "hardthreshold", "variance"].contains(&name)
}

/// Arguments for a name alone.
pub fn example(entry: &Entry) -> &'static str {
    // Five rows of 1 %: a sketch smaller than the gradient.
    if entry.info.name == "sketched" { "k=0.01" } else { entry.examples[0] }
}

/// The strategy of a fitted name for these values ([`MORE`] than a gradient has).
pub fn text(name: &str, values: &[f32]) -> Result<String> {
    match name {
        "threshold" => Ok(format!("threshold(v={:e})", rounded(quantile(values)))),
        "hardthreshold" => Ok(format!("hardthreshold(tau={:e})", rounded(quantile(values)))),
        "variance" => variance(values),
        _ => bail!("failed to choose parameters of {name}: none depend on the values"),
    }
}

/// To four digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

/// The magnitude that a share of the values is above.
fn quantile(values: &[f32]) -> f64 {
    let stream = Stream::new(2, [0; 4]);
    let mut sample: Vec<f32> = match values.len() {
        n if n <= QUANTILE => values.iter().map(|x| x.abs()).collect(),
        n => (0..QUANTILE as u64).map(|i| values[stream.below(i, n as u64) as usize].abs()).collect(),
    };
    let above = (SHARE * sample.len() as f64).round() as usize;
    let at = sample.len() - 1 - above.min(sample.len() - 1);
    let cut = *sample.select_nth_unstable_by(at, f32::total_cmp).1;
    f64::from(cut.max(f32::MIN_POSITIVE))
}

/// Its share falls as alpha grows; what stands out of the noise shows after some steps only.
fn variance(values: &[f32]) -> Result<String> {
    let text = |alpha: f64| format!("variance(alpha={})+ef(vanilla)", rounded(alpha));
    let n = (values.len() - MORE).min(TRIED);
    // After t steps no r² exceeds t v.
    let (mut low, mut high) = (1.0, LESSONS as f64);
    for _ in 0..12 {
        let middle = 0.5 * (low + high);
        let sends_more = share(&text(middle), &values[..n + MORE])? > SHARE;
        *(if sends_more { &mut low } else { &mut high }) = middle;
    }
    Ok(text(0.5 * (low + high)))
}

/// The share that is sent, after steps that teach.
fn share(text: &str, values: &[f32]) -> Result<f64> {
    let n = values.len() - MORE;
    let strategy = text.parse().map_err(|error| anyhow!("failed to {error}"))?;
    let mut pipeline = Pipeline::new(&strategy, Layers::fused(n)?, Member::alone(1));
    let (mut out, mut mean, mut sent) = (Writer::new(), vec![0.0; n], 0);
    for index in 0..LESSONS + COUNTED {
        let step = Step { index: index as u64, learning_rate: 0.1 };
        pipeline.compress(Gradient::F32(shifted(values, n, index as u64)), step, &mut out)?;
        if index >= LESSONS {
            pipeline.decompress(out.bytes(), step.index, &mut mean)?;
            sent += mean.iter().filter(|value| **value != 0.0).count();
        }
    }
    Ok(sent as f64 / (COUNTED * n) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{DType, Distribution};

    /// On every distribution and size, what is chosen sends about 1 %.
    #[test]
    fn about_one_percent_is_sent() {
        for distribution in [Distribution::Normal, Distribution::Laplace, Distribution::Recorded] {
            for n in [20_000, 300_000] {
                let values = distribution.values(n + MORE, DType::Fp32);
                for name in ["threshold", "hardthreshold", "variance"] {
                    assert!(is_fitted(name));
                    let text = text(name, &values).unwrap();
                    let got = share(&text, &values).unwrap();
                    assert!((0.005..0.02).contains(&got), "{text} of {}: {got}", distribution.name());
                }
            }
        }
        assert!(!is_fitted("topk") && text("topk", &[0.0; 2000]).is_err());
    }
}
