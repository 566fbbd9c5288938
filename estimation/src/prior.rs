//! What is taken of a compressor that nobody has measured, nor said the sizes of.

use crate::profile::LEAST_GAIN;
use flexcomm_domain::spec::{Class, CompressorSpec, Element, Travels};
use flexcomm_domain::{CodecBytes, CompressionRatio, Family, Gain};

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
    let rounds = family.name() == "bf16" && family.any().travels() == Travels::Sums(Element::Bf16);
    if rounds { Gain::new(1.0 - 0.25f64.powi(8)).ok() } else { None }
}

/// Assumed gain of what no trial has measured, on a gradient of so many values, `bytes_share` being its bytes over the dense
/// gradient's. An unbiased compressor has 1/(1 + ω) of normally distributed values, by which error feedback scales it; of others
/// [`CompressorSpec::typical_gain`] has closed forms. A quantizer of b bits over a grid of four standard deviations to either side
/// errs by Δ²/6 per value (Δ = 8σ/2^b, rounded at random);
/// anything else is taken to keep as much as top-k of as many bytes, which `sparse` says.
pub fn prior_gain(spec: &CompressorSpec, (values, bytes_share): (u64, f64), sparse: Gain) -> Gain {
    let unbiased = || Gain::new(1.0 / (1.0 + spec.typical_variance(values)?)).ok();
    let typical = || Gain::new(spec.typical_gain(values, sparse.get())?.clamp(LEAST_GAIN, 1.0)).ok();
    if let Some(gain) = known_gain((*spec).into()).or_else(unbiased).or_else(typical) {
        return gain;
    }
    let bits = 32.0 * bytes_share;
    let quantized = 1.0 - 64.0 / 6.0 * 0.25f64.powf(bits);
    match spec.compressor().class {
        Class::Quantization => Gain::new(quantized.max(sparse.get())).unwrap_or(sparse),
        Class::Sparsification | Class::Hybrid | Class::LowRank => sparse,
    }
}

/// Of what a selection keeps beyond chance, the share that another rank's indices keep. Measured while N = 2 to 16 ranks trained
/// perceptrons on Fashion-MNIST at CR 0.1 to 0.001: 0.24 to 0.44 once residuals had settled, whatever N and CR
/// (docs/decisions/assumed-gains.md).
const OTHERS_SHARE: f64 = 1.0 / 3.0;

/// Assumed gain of one rank that selects for all `ranks` (AR-Topk), where each keeps `own` that selects for itself. What any c of
/// the values keep, c; of what `own` has beyond that, all on a rank's own turn, which is one of N, and on the others'
/// turns [`OTHERS_SHARE`], since ranks have part of their large values in common.
pub fn selected_by_one(own: Gain, cr: CompressionRatio, ranks: usize) -> Gain {
    let turn = 1.0 / ranks.max(1) as f64;
    let chance = cr.get().min(own.get());
    Gain::new(chance + (own.get() - chance) * (turn + (1.0 - turn) * OTHERS_SHARE)).unwrap_or(own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, proptest};

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

    /// No measured selection bounds what is known in closed form.
    #[test]
    fn closed_forms_come_before_bytes() {
        let gain = |text: &str, sparse| {
            let sparse = Gain::new(sparse).unwrap();
            prior_gain(&text.parse().unwrap(), (1 << 20, 1.0 / 32.0), sparse).get()
        };
        for text in ["onebit(scaling=true)", "efsignsgd+ef(efsign)", "onebitsgd"] {
            assert!((gain(text, 0.1) - 2.0 / std::f64::consts::PI).abs() < 1e-12, "{text}");
        }
        assert!((gain("randomk(k=0.03)", 0.3) - 0.03).abs() < 1e-6);
        assert_eq!(gain("onebitsgd(threshold=1)", 0.1), 0.1, "its threshold has the gradient's unit");
        assert_eq!(gain("gradiveq(d=16,slice=128,every=1)", 0.1), (1.0 + 0.125) / 2.0);
        let signs = gain("adaptivethreshold(k=0.01)+ef(vanilla)", 0.3);
        assert!(signs > 0.29 && signs < 0.3, "{signs}");
        assert_eq!(gain("qsparse(k=0.01,scaled=false)+ef(vanilla)", 0.3), LEAST_GAIN, "it expands what it keeps");
    }

    /// Ranks, ratio, and the gains of ranks that select for themselves and of STAR: of a perceptron on Fashion-MNIST
    /// (docs/decisions/assumed-gains.md), and two of the lab.
    const MEASURED: [(usize, f64, f64, f64); 14] = [
        (2, 0.1, 0.636, 0.485),
        (2, 0.011, 0.103, 0.0719),
        (2, 0.001, 0.0080, 0.0055),
        (4, 0.1, 0.640, 0.402),
        (4, 0.011, 0.103, 0.0554),
        (4, 0.001, 0.0083, 0.0044),
        (8, 0.1, 0.649, 0.371),
        (8, 0.011, 0.106, 0.0516),
        (8, 0.001, 0.0085, 0.0037),
        (16, 0.1, 0.654, 0.360),
        (16, 0.011, 0.110, 0.0513),
        (16, 0.004, 0.0393, 0.0179),
        (4, 0.1, 0.59, 0.34),
        (4, 0.011, 0.084, 0.050),
    ];

    #[test]
    fn one_that_selects_for_all_is_assumed_to_keep_what_was_measured() {
        for (ranks, cr, own, measured) in MEASURED {
            let gain = selected_by_one(Gain::new(own).unwrap(), CompressionRatio::new(cr).unwrap(), ranks).get();
            assert!((gain / measured - 1.0).abs() < 0.15, "{ranks} ranks at {cr}: {gain}, measured {measured}");
        }
    }

    proptest! {
        #[test]
        fn one_that_selects_for_all_keeps_less_the_more_ranks_there_are(own in 1e-6..=1.0f64, c in 1e-6..=1.0f64, ranks in 1usize..999) {
            let of = |ranks| selected_by_one(Gain::new(own).unwrap(), CompressionRatio::new(c).unwrap(), ranks).get();
            prop_assert!((of(1) - own).abs() <= 1e-12 * own);
            prop_assert!(of(ranks + 1) <= of(ranks) * (1.0 + 1e-12) && of(ranks) >= c.min(own) * (1.0 - 1e-12));
        }
    }

    #[test]
    fn rounding_is_known_without_measuring() {
        let gain = |text: &str| known_gain(text.parse().unwrap()).map(Gain::get);
        assert_eq!(gain("bf16"), Some(1.0 - 2f64.powi(-16)));
        assert_eq!((gain("eightbit"), gain("topk"), gain("fp16")), (None, None, None));
        assert_eq!((gain("qsgd(s=7)"), gain("qsgd(s=7)+ef(vanilla)")), (None, None));
    }
}
