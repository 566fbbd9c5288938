//! What is taken of a compressor that nobody has measured, nor said the sizes of.

use flexcomm_domain::spec::{Class, CompressorSpec, Element, Travels};
use flexcomm_domain::{CodecBytes, Family, Gain};

/// Message sizes where no trainer has said them: the paper's two numbers per kept value for what keeps a share, an element per
/// value for what adds up, and nothing saved by anything else.
pub fn assumed_bytes(family: Family) -> CodecBytes {
    match family.any().travels() {
        Travels::Sums(element) => CodecBytes { value_bytes: element.bytes() as f64, ..CodecBytes::DENSE },
        Travels::Gathers if family.has_ratio() => CodecBytes::PAPER,
        Travels::Gathers => CodecBytes::DENSE,
    }
}

/// Gain that needs no measuring. Rounding to the nearest bfloat16, which has 8 bits of precision and the exponents of f32, errs
/// by at most 2^-8 of each value, so 1 - 2^-16 of the energy is kept; fp16 depends on the gradient, since it makes zeros of
/// values below 2^-25.
pub fn known_gain(family: Family) -> Option<Gain> {
    let rounds = matches!((family.name(), family.any().travels()), ("bf16", Travels::Sums(Element::Bf16)));
    if rounds { Gain::new(1.0 - 0.25f64.powi(8)).ok() } else { None }
}

/// Assumed gain of what no trial has measured, on a gradient of so many values, `bytes_share` being its bytes over the dense
/// gradient's. An unbiased compressor has 1/(1 + ω) of normally distributed values, by which error feedback scales it. A quantizer of b
/// bits over a grid of four standard deviations to either side errs by Δ²/6 per value (Δ = 8σ/2^b, rounded at random);
/// anything else is taken to keep as much as top-k of as many bytes, which `sparse` says.
pub fn prior_gain(spec: &CompressorSpec, (values, bytes_share): (u64, f64), sparse: Gain) -> Gain {
    let unbiased = || Gain::new(1.0 / (1.0 + spec.typical_variance(values)?)).ok();
    if let Some(gain) = known_gain((*spec).into()).or_else(unbiased) {
        return gain;
    }
    let bits = 32.0 * bytes_share;
    let quantized = 1.0 - 64.0 / 6.0 * 0.25f64.powf(bits);
    match spec.compressor().class {
        Class::Quantization => Gain::new(quantized.max(sparse.get())).unwrap_or(sparse),
        Class::Sparsification | Class::Hybrid | Class::LowRank => sparse,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_what_is_known_of_the_family() {
        let bytes = |text: &str| assumed_bytes(text.parse().unwrap()).pairs(1000, 1000);
        assert_eq!((bytes("none"), bytes("fp16"), bytes("bf16")), (4000.0, 2000.0, 2000.0));
        assert_eq!((bytes("topk"), bytes("qsgd(s=7)")), (8000.0, 4000.0));
    }

    #[test]
    fn more_bits_are_assumed_to_keep_more() {
        let sparse = Gain::new(0.1).unwrap();
        let gain = |text: &str, share: f64| prior_gain(&text.parse().unwrap(), (1 << 20, share), sparse).get();
        assert!(gain("eightbit", 0.25) > 0.9998);
        let fine = gain("qsgd(s=7,norm=max)+ef(vanilla)", 0.125);
        assert!(fine > 0.95 && fine < 0.97 && gain("qsgd(s=4)+ef(vanilla)", 0.125) < 0.25, "{fine}");
        assert_eq!((gain("signsgd", 1.0 / 32.0), gain("powersgd(rank=2)", 0.01)), (0.1, 0.1));
        assert!(gain("fp16", 0.5) > 0.999_999);
        let variance = "qsgd(s=7)".parse::<CompressorSpec>().unwrap().typical_variance(1 << 20).unwrap();
        assert_eq!(gain("qsgd(s=7)", 0.125), 1.0 / (1.0 + variance));
    }

    #[test]
    fn rounding_is_known_without_measuring() {
        let gain = |text: &str| known_gain(text.parse().unwrap()).map(Gain::get);
        assert_eq!(gain("bf16"), Some(1.0 - 2f64.powi(-16)));
        assert_eq!((gain("eightbit"), gain("topk"), gain("fp16")), (None, None, None));
        assert_eq!((gain("qsgd(s=7)"), gain("qsgd(s=7)+ef(vanilla)")), (None, None));
    }
}
