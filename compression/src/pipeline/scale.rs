//! Unbiased quantizers inside error feedback. With E C(e) = e and E ‖C(e)‖² = (1 + ω) ‖e‖², the residual of error feedback
//! grows without bound from ω = 1 on; C(e) / (1 + ω) is a contraction for every ω (Beznosikov et al. 2020, On biased compression for
//! distributed learning, section 2).
//!
//! ω is the step's own, ‖C(e)‖² / ‖e‖² − 1 of each tensor, since bounds for any tensor are far off: rounding to seven levels of
//! the largest of 512 values may have ω = 1.2 and has 0.03 on gradients. So the factor travels: the payload of such a message
//! begins with an f32 per tensor.

use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Target};
use crate::wire::{Reader, Writer};

/// Up to this ω nothing is scaled: error feedback is a contraction without it, and kernels on a GPU do not scale.
const LEAST_VARIANCE: f64 = 0.25;

/// Bytes of a factor.
pub(super) const FACTOR_BYTES: usize = 4;

/// 1 / (1 + ω), from ‖C(e)‖² and ‖e‖²: above 0, at most 1.
pub fn factor(energy: Energy) -> f32 {
    match energy.sent > (1.0 + LEAST_VARIANCE) * energy.compensated {
        true => ((energy.compensated / energy.sent) as f32).max(f32::MIN_POSITIVE),
        false => 1.0,
    }
}

/// As [`Codec::encode_taking`], of the scaled tensor: its factor, and the energy of what it sends.
pub(super) fn encode_taking(
    codec: &mut dyn Codec,
    x: &mut [f32],
    context: &Context,
    out: &mut Writer,
) -> Result<(f32, Energy), EncodeError> {
    let start = out.len();
    let energy = codec.encode(x, context, out)?;
    let factor = factor(energy);
    codec.decode(&mut Reader::new(&out.bytes()[start..]), context, Target::add(-factor, x))?;
    Ok((factor, Energy { sent: energy.sent * f64::from(factor).powi(2), ..energy }))
}

/// Reads the factors of so many tensors.
pub(super) fn read_factors(from: &mut Reader<'_>, tensors: usize, out: &mut Vec<f32>) -> Result<(), ReadError> {
    for factor in from.f32s("factor of a tensor", tensors)? {
        if !(factor > 0.0 && factor <= 1.0) {
            return Err(ReadError::number("factor of a tensor", factor, "above 0, at most 1"));
        }
        out.push(factor);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::Layers;
    use crate::pipeline::{Gradient, Member, Pipeline, Step};
    use crate::wire::Writer;
    use flexcomm_domain::spec::CompressorSpec;

    fn gradient(n: usize, step: u64) -> Vec<f32> {
        let stream = crate::random::Stream::new(step, [1; 4]);
        (0..n as u64).map(|i| (stream.unit(i) - stream.unit(i + n as u64)) as f32).collect()
    }

    /// ‖the residual‖² over ‖a gradient‖² after so many steps.
    fn relative_residual(text: &str, n: usize, steps: u64) -> f64 {
        let mut rank = Pipeline::new(&text.parse().unwrap(), Layers::new(&[n]).unwrap(), Member::alone(5));
        let (mut out, mut mean) = (Writer::new(), vec![0.0; n]);
        for index in 0..steps {
            let mut values = gradient(n, index);
            // One value that outweighs the others.
            values[17] = 30.0;
            rank.compress(Gradient::F32(&values), Step { index, learning_rate: 0.1 }, &mut out).unwrap();
            rank.aggregate(&[out.bytes()], index, &mut mean).unwrap();
        }
        let energy = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
        energy(&rank.residual()) / energy(&gradient(n, 0))
    }

    /// Unscaled, those with a variance above 1 end beyond f32's range. The bound of an average of random gradients,
    /// (1 - delta) / delta² for delta = 1 / (1 + ω), is far above.
    #[test]
    fn residuals_of_unbiased_compressors_stay_bounded() {
        let n = 10_000;
        let texts = crate::methods::examples().map(|spec| format!("{spec}+ef(vanilla)"));
        let scaled: Vec<String> =
            texts.filter(|text| text.parse::<CompressorSpec>().is_ok_and(|spec| spec.is_scaled())).collect();
        assert!(scaled.len() > 15, "{scaled:?}");
        for text in scaled {
            // For any tensor: n - 1 where only signs travel, at most sqrt(n) / s of s levels of a norm.
            let variance = match text.as_str() {
                "ssdm+ef(vanilla)" => n as f64,
                "qsgd(s=4,bucket=0,coding=gamma)+ef(vanilla)" => 25.0,
                "dithering(k=7,normalize=l2)+ef(vanilla)" => 15.0,
                _ => 100.0,
            };
            let residual = relative_residual(&text, n, 600);
            assert!(residual < 2.0 * (1.0 + variance) * variance, "{text}: {residual}");
        }
    }

    #[test]
    fn a_small_variance_is_not_scaled() {
        let n = 4096;
        let spec = "qsgd(s=7,norm=max)+ef(vanilla)".parse().unwrap();
        let mut rank = Pipeline::new(&spec, Layers::new(&[n]).unwrap(), Member::alone(5));
        let mut out = Writer::new();
        rank.compress(Gradient::F32(&gradient(n, 0)), Step { index: 0, learning_rate: 0.1 }, &mut out).unwrap();
        let payload = crate::wire::Envelope::parse(out.bytes()).unwrap().payload;
        assert_eq!(payload[..4], 1f32.to_le_bytes());
    }

    #[test]
    fn a_factor_that_is_none_is_refused_and_so_is_a_message_without() {
        let n = 1000;
        let layers = || Layers::new(&[n]).unwrap();
        let [mut with, mut without] =
            ["ssdm+ef(vanilla)", "ssdm"].map(|text| Pipeline::new(&text.parse().unwrap(), layers(), Member::alone(5)));
        let (mut out, mut mean) = (Writer::new(), vec![0.0; n]);
        let step = Step { index: 0, learning_rate: 0.1 };
        with.compress(Gradient::F32(&gradient(n, 0)), step, &mut out).unwrap();
        let refused = without.aggregate(&[out.bytes()], 0, &mut mean).unwrap_err().to_string();
        assert!(refused.contains("factors"), "{refused}");
        let (mut bytes, at) = (out.bytes().to_vec(), crate::wire::HEADER_BYTES);
        for bad in [0.0f32, -1.0, 1.5, f32::NAN] {
            bytes[at..at + 4].copy_from_slice(&bad.to_le_bytes());
            let refused = with.aggregate(&[&bytes], 0, &mut mean).unwrap_err().to_string();
            assert!(refused.contains("factor of a tensor"), "{bad}: {refused}");
        }
        without.compress(Gradient::F32(&gradient(n, 0)), step, &mut out).unwrap();
        assert!(with.aggregate(&[out.bytes()], 0, &mut mean).is_err());
    }
}
