//! Every compressor by name, with its parameters. What it does is in the crate `flexcomm-compression`, one file each.
#![expect(missing_docs, reason = "each says itself what it is and where it comes from")]

use super::nature::{self, Nature};
use super::params::{ANY_NUMBER, FACTOR, INSIDE_UNIT, Kind, NOT_NEGATIVE, POSITIVE, Param, SHARE};
use super::{Class, CompressorInfo, Element, OnRequest, Scope, Travels};
use std::ops::Bound;

/// Every compressor, by class.
pub static COMPRESSORS: &[&CompressorInfo] = &[
    &NONE,
    &ONEBIT,
    &FP16,
    &BF16,
    &EIGHTBIT,
    &ONEBITSGD,
    &SIGNSGD,
    &SIGNUM,
    &EFSIGNSGD,
    &SSDM,
    &QSGD,
    &LPCSVRG,
    &NATURAL,
    &DITHERING,
    &TERNGRAD,
    &INCEPTIONN,
    &MINMAX8,
    &TOPK,
    &RANDOMK,
    &THRESHOLD,
    &LWTOPK,
    &MSTOPK,
    &DGC,
    &SGC,
    &SIDCO,
    &ADAPTIVE,
    &VARIANCE,
    &SKETCHED,
    &QSPARSE,
    &HARDTHRESHOLD,
    &ADAPTIVETHRESHOLD,
    &SKETCHML,
    &THREELC,
    &POWERSGD,
    &GRADZIP,
    &ATOMO,
    &GRADIVEQ,
];

/// Those whose messages are values with their indices.
pub(super) static COPYING: [&CompressorInfo; 8] = [&TOPK, &LWTOPK, &MSTOPK, &DGC, &SGC, &SIDCO, &THRESHOLD, &VARIANCE];

/// What most compressors of a class have in common; each has a name, a description, a source and a nature of its own.
const fn usual(class: Class) -> CompressorInfo {
    CompressorInfo {
        name: "",
        class,
        about: "",
        source: "",
        params: &[],
        travels: |_| Travels::Gathers,
        nature: |_| Nature::Contractive(|_, _| 0.0),
        typical_gain: |_, _| None,
        scope: match class {
            Class::Sparsification => Scope::Bucket,
            Class::Quantization | Class::Hybrid | Class::LowRank => Scope::Tensor,
        },
        size_is_bound: false,
        candidates: &[],
        on_request: OnRequest::Usual,
    }
}

pub static NONE: CompressorInfo = CompressorInfo {
    name: "none",
    about: "nothing: every value as it is",
    source: "IEEE 754, binary32",
    travels: |_| Travels::Sums(Element::F32),
    nature: |_| Nature::Contractive(|_, _| 1.0),
    scope: Scope::Bucket,
    on_request: OnRequest::As(&[]),
    ..usual(Class::Quantization)
};

pub static ONEBIT: CompressorInfo = CompressorInfo {
    name: "onebit",
    about: "signs, times mean |x| if scaling is on",
    source: "BytePS, gradient compression design, onebit",
    params: &[Param::optional("scaling", Kind::Switch, 0.0, "whether signs are multiplied by mean |x|")],
    nature: |values| match values.is_on(0) {
        true => Nature::Contractive(|_, n| 1.0 / n.max(1) as f64),
        false => Nature::Biased("a sign says nothing of the magnitude"),
    },
    typical_gain: |values, typical| nature::mean_signs(values, typical).filter(|_| values.is_on(0)),
    on_request: OnRequest::As(&["onebit(scaling=true)+ef(vanilla)"]),
    ..usual(Class::Quantization)
};

pub static FP16: CompressorInfo = CompressorInfo {
    name: "fp16",
    about: "IEEE 754 binary16",
    source: "IEEE 754; GRACE's release, fp16",
    travels: |_| Travels::Sums(Element::F16),
    // Below 2^-25 a value becomes 0: no more can be said of all tensors.
    nature: |_| Nature::Contractive(|_, _| 0.0),
    scope: Scope::Bucket,
    candidates: &["fp16"],
    ..usual(Class::Quantization)
};

pub static BF16: CompressorInfo = CompressorInfo {
    name: "bf16",
    about: "the upper half of binary32",
    source: "bfloat16: Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training",
    travels: |_| Travels::Sums(Element::Bf16),
    // What is below the least number of half precision becomes 0.
    nature: |_| Nature::Contractive(|_, _| 0.0),
    scope: Scope::Bucket,
    candidates: &["bf16"],
    ..usual(Class::Quantization)
};

pub static EIGHTBIT: CompressorInfo = CompressorInfo {
    name: "eightbit",
    about: "8-bit floats relative to max |x|: dynamic tree or 1-3-4",
    source: "Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning, section 2; GRACE, section 3.1",
    params: &[Param::optional("type", Kind::Choice(&["dynamic", "static"]), 0.0, "how bits are shared out")],
    // No error exceeds |x|, since 0 is a code; the largest value's is below 3 %.
    nature: |_| Nature::Contractive(|_, n| 0.999 / n.max(1) as f64),
    candidates: &["eightbit+ef(vanilla)"],
    ..usual(Class::Quantization)
};

pub static ONEBITSGD: CompressorInfo = CompressorInfo {
    name: "onebitsgd",
    about: "one bit per value, decoded to the mean of its side",
    source: "Seide et al. 2014, 1-Bit SGD, sections 3.1 and 3.2; GRACE, section 3.1",
    params: &[
        Param::optional("threshold", ANY_NUMBER, 0.0, "values below it are one side"),
        Param::optional("per", Kind::Choice(&["tensor", "column"]), 0.0, "what has means of its own"),
    ],
    // What is left is ‖x‖² − ‖C(x)‖². With the threshold at 0 all values of a side have one sign, and then m times the
    // squared mean of m values is at least their energy / m. At another threshold the means may be 0.
    nature: |values| match values.number(0) == 0.0 {
        true => Nature::Contractive(|_, n| (1.0 - 1e-6) / n.max(1) as f64),
        false => Nature::Contractive(|_, _| 0.0),
    },
    typical_gain: |values, typical| nature::mean_signs(values, typical).filter(|_| values.number(0) == 0.0),
    ..usual(Class::Quantization)
};

pub static SIGNSGD: CompressorInfo = CompressorInfo {
    name: "signsgd",
    about: "signs; ranks decide by majority vote",
    source: "Bernstein et al. 2018, signSGD, algorithm 1; majority vote: Bernstein et al. 2019, algorithm 1",
    nature: |_| Nature::Biased("a sign says nothing of the magnitude"),
    scope: Scope::Bucket,
    // Its signs have no magnitude: error feedback would add up what they overshoot by.
    on_request: OnRequest::As(&["signsgd"]),
    ..usual(Class::Quantization)
};

pub static SIGNUM: CompressorInfo = CompressorInfo {
    name: "signum",
    about: "signs of a momentum; ranks decide by majority vote",
    source: "Bernstein et al. 2019, signSGD with Majority Vote, algorithm 1; GRACE, section 3.1",
    params: &[Param::optional("delta", FACTOR, 0.9, "decay of the momentum")],
    nature: |_| Nature::Biased("a sign says nothing of the magnitude, and it is the momentum's"),
    scope: Scope::Bucket,
    // Its signs have no magnitude: error feedback would add up what they overshoot by.
    on_request: OnRequest::As(&["signum"]),
    ..usual(Class::Quantization)
};

pub static EFSIGNSGD: CompressorInfo = CompressorInfo {
    name: "efsignsgd",
    about: "signs times mean |x|; use it with ef(efsign)",
    source: "Karimireddy et al. 2019, Error Feedback Fixes SignSGD, algorithm 1",
    nature: |_| Nature::Contractive(|_, n| 1.0 / n.max(1) as f64),
    typical_gain: nature::mean_signs,
    ..usual(Class::Quantization)
};

pub static SSDM: CompressorInfo = CompressorInfo {
    name: "ssdm",
    about: "a sign at random, times the Euclidean norm",
    source: "Safaryan and Richtárik 2021, Stochastic Sign Descent Methods, definition of the stochastic sign",
    // But for norms beyond half of the largest f32, where the norm is cut.
    nature: |_| Nature::Unbiased(|_, n| n as f64 - 1.0),
    ..usual(Class::Quantization)
};

pub static QSGD: CompressorInfo = CompressorInfo {
    name: "qsgd",
    about: "rounds at random to s levels of each bucket's norm",
    source: "Alistarh et al. 2017, QSGD, section 3.1, equation 4; buckets: section 4",
    params: &[
        Param::required("s", Kind::Whole(1, 127), "levels above 0"),
        Param::optional(
            "bucket",
            Kind::Whole(0, u32::MAX as u64),
            512.0,
            "values per norm, fastest as a multiple of 64; 0: the whole tensor",
        ),
        Param::optional("norm", Kind::Choice(&["l2", "max"]), 0.0, "Euclidean norm, or max |x|"),
        Param::optional(
            "coding",
            Kind::Choice(&["least", "gamma", "delta", "packed"]),
            0.0,
            "least: of fixed width, or Elias' codes where most levels are 0",
        ),
    ],
    nature: |_| Nature::Unbiased(nature::qsgd),
    candidates: &["qsgd(s=7,norm=max)+ef(vanilla)"],
    ..usual(Class::Quantization)
};

pub static LPCSVRG: CompressorInfo = CompressorInfo {
    name: "lpcsvrg",
    about: "rounds at random to a grid of w bits, clipped to a share of max |x|",
    source: "Yu et al. 2019, LPC-SVRG, section 3; GRACE, equation 4",
    params: &[
        Param::required("bits", Kind::Whole(2, 8), "w"),
        Param::optional("lambda", SHARE, 1.0, "share of max |x| that the grid reaches"),
    ],
    nature: |values| match values.number(1) < 1.0 {
        true => Nature::Biased("what lies beyond the grid is clipped"),
        false => Nature::Unbiased(nature::lpcsvrg),
    },
    on_request: OnRequest::As(&["lpcsvrg(bits=4)"]),
    ..usual(Class::Quantization)
};

pub static NATURAL: CompressorInfo = CompressorInfo {
    name: "natural",
    about: "rounds at random to powers of two",
    source: "Horváth et al. 2019, Natural Compression, definition 1 and theorem 1",
    nature: |_| Nature::Unbiased(|_, _| nature::POWERS_OF_TWO),
    scope: Scope::Bucket,
    ..usual(Class::Quantization)
};

pub static DITHERING: CompressorInfo = CompressorInfo {
    name: "dithering",
    about: "rounds at random to k levels of a norm, equal or powers of two",
    source: "BytePS, gradient compression design, dithering; Horváth et al. 2019, Natural Compression, section 4",
    params: &[
        Param::required("k", Kind::Whole(1, 127), "levels above 0"),
        Param::optional("partition", Kind::Choice(&["linear", "natural"]), 0.0, "equal levels, or powers of two"),
        Param::optional("normalize", Kind::Choice(&["max", "l2"]), 0.0, "which norm is level 1"),
    ],
    nature: |_| Nature::Unbiased(nature::dithering),
    on_request: OnRequest::As(&["dithering(k=7)"]),
    ..usual(Class::Quantization)
};

pub static TERNGRAD: CompressorInfo = CompressorInfo {
    name: "terngrad",
    about: "-1, 0 or 1 at random, times max |x|",
    source: "Wen et al. 2017, TernGrad, equations 2 and 3; clipping: section 4",
    params: &[Param::optional("clip", NOT_NEGATIVE, 0.0, "clips to so many standard deviations; 0: not at all")],
    nature: |values| match values.number(0) > 0.0 {
        true => Nature::Biased("what is clipped is sent as the clipped value"),
        false => Nature::Unbiased(|_, n| nature::grid(nature::largest_normal(n))),
    },
    ..usual(Class::Quantization)
};

pub static INCEPTIONN: CompressorInfo = CompressorInfo {
    name: "inceptionn",
    about: "32, 16, 8 or 0 bits by magnitude, within an absolute error bound",
    source: "Li et al. 2018, INCEPTIONN, algorithm 2; GRACE, section 3.1",
    params: &[Param::optional("bound", Kind::Whole(1, 14), 10.0, "b: errors stay below 2^-b")],
    // A tensor below the bound is sent as zeros.
    nature: |_| Nature::Contractive(|_, _| 0.0),
    scope: Scope::Bucket,
    size_is_bound: true,
    ..usual(Class::Quantization)
};

pub static MINMAX8: CompressorInfo = CompressorInfo {
    name: "minmax8",
    about: "8 bits between min and max",
    source: "Gan et al. 2021, BAGUA; its release, ByteGrad, MinMaxUInt8",
    // Every error is at most |x| and at most one step, and the largest |x| is at least 127.5 steps.
    nature: |_| Nature::Contractive(|_, n| 0.99 / n.max(1) as f64),
    ..usual(Class::Quantization)
};

pub static TOPK: CompressorInfo = CompressorInfo {
    name: "topk",
    about: "the k largest values by magnitude",
    source: "Alistarh et al. 2018; GRACE 3.2",
    params: &[Param::required("k", Kind::Kept, "how many values are kept")],
    nature: |_| Nature::Contractive(|values, n| values.kept(0, n) as f64 / n.max(1) as f64),
    candidates: &["topk(k=*)+ef(vanilla)"],
    ..usual(Class::Sparsification)
};

pub static RANDOMK: CompressorInfo = CompressorInfo {
    name: "randomk",
    about: "k values at random; with a shared seed no indices travel",
    source: "Stich et al. 2018, definition 2.1; GRACE 3.2; BytePS, randomk",
    params: &[
        Param::required("k", Kind::Kept, "how many values are kept"),
        Param::optional("scaled", Kind::Switch, 0.0, "whether values are multiplied by n/k: unbiased"),
        Param::optional("shared", Kind::Switch, 1.0, "whether all ranks draw the same indices"),
    ],
    travels: |values| match values.is_on(2) {
        true => Travels::Sums(Element::F32),
        false => Travels::Gathers,
    },
    nature: |values| match values.is_on(1) {
        true => Nature::Unbiased(|values, n| n as f64 / values.kept(0, n).max(1) as f64 - 1.0),
        false => Nature::ContractiveInMean(|values, n| values.kept(0, n) as f64 / n.max(1) as f64),
    },
    typical_gain: nature::random,
    ..usual(Class::Sparsification)
};

pub static THRESHOLD: CompressorInfo = CompressorInfo {
    name: "threshold",
    about: "all values with a magnitude above v",
    source: "Dutta et al. 2020, \"On the discrepancy between the theoretical analysis and practical implementations of compressed communication\"; GRACE 3.2",
    params: &[Param::required("v", POSITIVE, "magnitude above which values are sent")],
    // What is sent is exact; there may be nothing to send.
    nature: |_| Nature::Contractive(|_, _| 0.0),
    size_is_bound: true,
    on_request: OnRequest::No("its threshold v has the gradient's unit"),
    ..usual(Class::Sparsification)
};

pub static LWTOPK: CompressorInfo = CompressorInfo {
    name: "lwtopk",
    about: "the k largest values of each layer",
    source: "Tyagi and Swany 2023, \"Flexible communication for optimal distributed learning\", 2-C, LWTopk",
    params: &[Param::required("k", Kind::Kept, "how many values of each layer are kept")],
    nature: |_| Nature::Contractive(|values, n| values.kept(0, n) as f64 / n.max(1) as f64),
    scope: Scope::Tensor,
    candidates: &["lwtopk(k=*)+ef(vanilla)"],
    ..usual(Class::Sparsification)
};

pub static MSTOPK: CompressorInfo = CompressorInfo {
    name: "mstopk",
    about: "about the k largest values, by 25 rounds of bisection for a threshold",
    source: "Shi et al. 2021, algorithm 1",
    params: &[Param::required("k", Kind::Kept, "how many values are kept")],
    // Only the largest value, or one within 2^-25 of it, is sure to be taken.
    nature: |_| Nature::Contractive(|_, n| 0.99 / n.max(1) as f64),
    candidates: &["mstopk(k=*)+ef(vanilla)"],
    ..usual(Class::Sparsification)
};

/// What a selection by a threshold from a sample takes.
const SAMPLED: &[Param] = &[
    Param::required("k", Kind::Kept, "about how many values are kept"),
    Param::optional("sample", INSIDE_UNIT, 0.01, "share of values that the threshold is estimated from"),
    Param::optional(
        "most",
        Kind::Number(Bound::Included(1.0), Bound::Included(100.0)),
        1.3,
        "times k, beyond which a top-k among what reaches the threshold follows",
    ),
];

pub static DGC: CompressorInfo = CompressorInfo {
    name: "dgc",
    about: "values above a threshold that a sample gives, about k of them",
    source: "Lin et al. 2018, \"Deep gradient compression\", 3 and 5 (sampled, hierarchical selection); GRACE 3.2",
    params: SAMPLED,
    // At least the largest value is sent: the highest of the sample is a threshold that it reaches.
    nature: |_| Nature::Contractive(|_, n| 1.0 / n.max(1) as f64),
    scope: Scope::Tensor,
    ..usual(Class::Sparsification)
};

pub static SGC: CompressorInfo = CompressorInfo {
    name: "sgc",
    about: "SGC's selection, which is DGC's; its compensation is ef(sgc)",
    source: "Sun et al. 2019, \"Sparse gradient compression for distributed SGD\"; GRACE 3.2",
    params: SAMPLED,
    // At least the largest value is sent: the highest of the sample is a threshold that it reaches.
    nature: |_| Nature::Contractive(|_, n| 1.0 / n.max(1) as f64),
    scope: Scope::Tensor,
    ..usual(Class::Sparsification)
};

pub static SIDCO: CompressorInfo = CompressorInfo {
    name: "sidco",
    about: "about k values above a threshold that a fitted distribution gives",
    source: "Abdelmoniem et al. 2021, section 2 and algorithm 1",
    params: &[
        Param::required("k", Kind::Kept, "about how many values are kept"),
        Param::optional("fit", Kind::Choice(&["exponential", "gamma", "pareto"]), 0.0, "distribution of |x|"),
        Param::optional("first", INSIDE_UNIT, 0.25, "share that each stage but the last aims at"),
        Param::optional("tolerance", INSIDE_UNIT, 0.2, "how far the mean share may be off before stages change"),
        Param::optional("every", Kind::Whole(1, 1_000_000), 5.0, "steps between looks at the number of stages"),
    ],
    // A threshold that no value exceeds sends nothing.
    nature: |_| Nature::Contractive(|_, _| 0.0),
    ..usual(Class::Sparsification)
};

pub static ADAPTIVE: CompressorInfo = CompressorInfo {
    name: "adaptive",
    about: "values at random, likelier the larger; unbiased",
    source: "Wangni et al. 2018, algorithm 3 and section 3.3; GRACE 3.2",
    params: &[
        Param::required("k", Kind::Kept, "how many values are sent in the mean"),
        Param::optional("rounds", Kind::Whole(0, 100), 2.0, "how often probabilities are scaled again"),
    ],
    nature: |_| Nature::Unbiased(nature::adaptive),
    size_is_bound: true,
    ..usual(Class::Sparsification)
};

pub static VARIANCE: CompressorInfo = CompressorInfo {
    name: "variance",
    about: "values whose accumulated gradient stands out of its noise",
    source: "Tsuzuku et al. 2018, algorithm 1 (a step's gradient as one sample); GRACE 3.2",
    params: &[
        Param::optional("alpha", POSITIVE, 1.0, "a value is sent when r^2 > alpha v"),
        Param::optional("zeta", SHARE, 0.999, "decay of v where nothing was sent"),
    ],
    // What is sent is exact; there may be nothing to send.
    nature: |_| Nature::Accumulated(|_, _| 0.0),
    size_is_bound: true,
    ..usual(Class::Sparsification)
};

pub static SKETCHED: CompressorInfo = CompressorInfo {
    name: "sketched",
    about: "the k largest of the sum over ranks, found by count-sketches; sums in flight",
    source: "Ivkin et al. 2019, algorithms 1 and 2; GRACE 3.2",
    params: &[
        Param::required("k", Kind::Kept, "how many values are kept"),
        Param::optional("rows", Kind::Whole(1, 15), 5.0, "independent hashes: best odd"),
        Param::optional("columns", Kind::Kept, 0.01, "sums per row, as a share of the values or a number"),
        Param::optional("recover", Kind::Choice(&["top", "heavymix"]), 0.0, "which coordinates the sketch gives"),
    ],
    travels: |_| Travels::Sums(Element::F32),
    // What is sent is exact; that it is large holds with high probability only.
    nature: |_| Nature::Contractive(|_, _| 0.0),
    ..usual(Class::Sparsification)
};

pub static QSPARSE: CompressorInfo = CompressorInfo {
    name: "qsparse",
    about: "k values, the largest or random ones, in few bits each",
    source: "Basu et al. 2019, \"Qsparse-local-SGD\", lemmas 1 to 3; GRACE 3.3",
    params: &[
        Param::required("k", Kind::Kept, "how many values are kept"),
        Param::optional("select", Kind::Choice(&["top", "random"]), 0.0, "the largest, or random ones"),
        Param::optional("quantize", Kind::Choice(&["levels", "sign"]), 0.0, "stochastic levels, or signs"),
        Param::optional("s", Kind::Whole(1, 127), 15.0, "levels of the norm"),
        Param::optional("scaled", Kind::Switch, 1.0, "whether levels are divided by 1 + beta"),
    ],
    nature: nature::of_qsparse,
    typical_gain: nature::qsparse,
    size_is_bound: true,
    ..usual(Class::Hybrid)
};

pub static HARDTHRESHOLD: CompressorInfo = CompressorInfo {
    name: "hardthreshold",
    about: "±tau for each value with a magnitude above tau",
    source: "Strom 2015, section 3; GRACE 3.3",
    params: &[Param::required("tau", POSITIVE, "threshold, and what is sent for values beyond it")],
    // (|x| − tau)² is at most x² beyond tau; there may be nothing to send.
    nature: |_| Nature::Contractive(|_, _| 0.0),
    scope: Scope::Bucket,
    size_is_bound: true,
    on_request: OnRequest::No("its threshold tau has the gradient's unit"),
    ..usual(Class::Hybrid)
};

pub static ADAPTIVETHRESHOLD: CompressorInfo = CompressorInfo {
    name: "adaptivethreshold",
    about: "where the largest of the positive and of the negative values are, and one mean for each",
    source: "Dryden et al. 2016, section III; GRACE 3.3 and 4.3",
    params: &[
        Param::required("k", Kind::Kept, "about how many values are sent; the same share of each sign"),
        Param::optional("sample", INSIDE_UNIT, 0.01, "share of values that the thresholds are estimated from"),
    ],
    // A mean is never farther from what it stands for than zero is; there may be nothing to send.
    nature: |_| Nature::Contractive(|_, _| 0.0),
    typical_gain: nature::signed_topk,
    size_is_bound: true,
    ..usual(Class::Hybrid)
};

pub static SKETCHML: CompressorInfo = CompressorInfo {
    name: "sketchml",
    about: "indices of what is not 0, and the numbers of their quantile buckets through a MinMaxSketch",
    source: "Jiang et al. 2018, section 3; GRACE 3.3",
    params: &[
        Param::optional("buckets", Kind::Whole(2, 256), 128.0, "quantile buckets of each sign"),
        Param::optional("rows", Kind::Whole(0, 8), 2.0, "hash tables of the sketch; 0: no sketch"),
        Param::optional("columns", SHARE, 0.2, "places of a table per value that it holds"),
        Param::optional("groups", Kind::Whole(1, 16), 8.0, "parts that the buckets are cut into"),
    ],
    nature: nature::of_sketchml,
    scope: Scope::Bucket,
    size_is_bound: true,
    on_request: OnRequest::As(&["sketchml+ef(vanilla)"]),
    ..usual(Class::Hybrid)
};

pub static THREELC: CompressorInfo = CompressorInfo {
    name: "threelc",
    about: "three values, five to a byte, runs of zeros shortened",
    source: "Lim et al. 2019, \"3LC\", section 3; GRACE 3.3",
    params: &[Param::optional(
        "s",
        Kind::Number(Bound::Included(1.0), Bound::Excluded(2.0)),
        1.0,
        "sparsity multiplier: the larger, the more zeros",
    )],
    // |x| >= M/2 comes no farther from 0 by taking M away, and the largest value, M/s, is left with s − 1 of itself.
    nature: |_| Nature::Contractive(|values, n| 0.999 * (1.0 - (values.number(0) - 1.0).powi(2)) / n.max(1) as f64),
    typical_gain: nature::threelc,
    size_is_bound: true,
    ..usual(Class::Hybrid)
};

pub static POWERSGD: CompressorInfo = CompressorInfo {
    name: "powersgd",
    about: "each layer as a product of two thin matrices, by subspace iteration with a warm start",
    source: "Vogels et al. 2019, \"PowerSGD\", algorithm 1; GRACE 3.4",
    params: &[Param::required("rank", Kind::Whole(1, 1024), "columns of the thin matrices")],
    travels: |_| Travels::Sums(Element::F32),
    nature: |_| Nature::Contractive(|_, _| 0.0),
    candidates: &["powersgd(rank=1)+ef(vanilla)", "powersgd(rank=2)+ef(vanilla)", "powersgd(rank=4)+ef(vanilla)"],
    ..usual(Class::LowRank)
};

pub static GRADZIP: CompressorInfo = CompressorInfo {
    name: "gradzip",
    about: "each layer as a product of two thin matrices, by regularised alternating least squares",
    source: "Cho et al. 2019, \"GradZip\", as GRACE 3.4 defines it",
    params: &[
        Param::required("rank", Kind::Whole(1, 256), "columns of the thin matrices"),
        Param::optional(
            "lambda",
            Kind::Number(Bound::Included(1e-9), Bound::Excluded(1.0)),
            0.001,
            "weight of the regulariser, relative to the factors",
        ),
    ],
    travels: |_| Travels::Sums(Element::F32),
    nature: |_| Nature::Contractive(|_, _| 0.0),
    typical_gain: nature::gradzip,
    on_request: OnRequest::As(&["gradzip(rank=4)+ef(vanilla)"]),
    ..usual(Class::LowRank)
};

pub static ATOMO: CompressorInfo = CompressorInfo {
    name: "atomo",
    about: "singular vectors of each layer at random, unbiased",
    source: "Wang et al. 2018, \"ATOMO\", algorithm 1 and section 4 (spectral-ATOMO); GRACE 3.4",
    params: &[Param::required("budget", POSITIVE, "how many atoms are sent in the mean")],
    nature: |_| Nature::Unbiased(nature::atomo),
    size_is_bound: true,
    on_request: OnRequest::As(&["atomo(budget=3)"]),
    ..usual(Class::LowRank)
};

pub static GRADIVEQ: CompressorInfo = CompressorInfo {
    name: "gradiveq",
    about: "slices of each layer on the principal components of slices before",
    source: "Yu et al. 2018, \"GradiVeQ\", sections 3 and 4; GRACE 3.4",
    params: &[
        Param::required("d", Kind::Whole(1, 1024), "components kept of each slice"),
        Param::optional("slice", Kind::Whole(2, 2048), 512.0, "values of a slice"),
        Param::optional("every", Kind::Whole(1, 1_000_000), 100.0, "compressed steps after each that is not"),
    ],
    travels: |_| Travels::Sums(Element::F32),
    nature: |_| Nature::Biased("components of earlier gradients promise nothing of this one"),
    typical_gain: nature::gradiveq,
    size_is_bound: true,
    on_request: OnRequest::As(&["gradiveq(d=64)+ef(vanilla)"]),
    ..usual(Class::LowRank)
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_compressor_says_what_it_is() {
        for info in COMPRESSORS {
            for text in [info.name, info.about, info.source] {
                assert!(!text.is_empty(), "{info:?}");
            }
        }
    }
}
