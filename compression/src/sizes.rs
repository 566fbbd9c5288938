//! What a compressor sends in a step, before any values are seen.

use crate::Layers;
use crate::codec::Size;
use crate::pipeline::{Member, Pipeline};
use crate::wire::header_bytes;
use flexcomm_domain::spec::{CompressorSpec, Scope, Travels, selection_bytes};
use flexcomm_domain::{CodecBytes, CompressionRatio, Family, IndexBytes};

/// Bytes and collectives of one step of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Of all messages, with the headers of those that are gathered; the most there can be where values decide.
    pub bytes: usize,
    /// Collectives one after the other. Gathered messages whose size depends on the values take one more, for the sizes.
    pub rounds: u32,
}

impl Sizes {
    /// Of a bucket with these layers.
    pub fn of(spec: &CompressorSpec, layers: Layers) -> Self {
        // A memory keeps a residual and sends none of it.
        let pipeline = Pipeline::new(&spec.without_memory(), layers, Member::alone(0));
        let rounds = pipeline.rounds();
        let factors = if spec.is_scaled() { 4 * pipeline.tensors() } else { 0 };
        match (spec.travels(), pipeline.size()) {
            (Travels::Sums(_), _) => {
                let bytes = (0..rounds).map(|round| pipeline.payload_size(round).most()).sum();
                Self { bytes, rounds }
            }
            (Travels::Gathers, Size::Exact(bytes)) => Self { bytes: bytes + factors, rounds },
            (Travels::Gathers, Size::AtMost(bytes)) => Self { bytes: bytes + factors, rounds: rounds + 1 },
        }
    }

    /// What a family's messages weigh at any ratio, in a bucket with these layers: what trainers announce and cost models charge.
    ///
    /// What sends k values with their indices is charged as [`Self::of`] has it: to the byte as one tensor in f32 or bf16, and
    /// within 4 bytes in int8, whose steps come by 256 values. With an index set per layer (`lwtopk`), what the sets weigh
    /// beyond one of all values is taken at [`SMALL_SHARE`] and counts as header: within 2 % while most values are in
    /// layers of which 100 and more are kept, a few bytes per layer off where most layers keep a single value. AR-Topk writes one
    /// set for all tensors and is charged the same header.
    /// What selects about k values is charged for k, what sends sums of a share is linear in k.
    pub fn codec(family: Family, layers: &Layers) -> CodecBytes {
        match (family.has_ratio(), family.any().travels()) {
            (false, _) => whole(&family.any(), layers),
            (true, Travels::Gathers) => selected(&member(family, SMALL_SHARE), layers),
            (true, Travels::Sums(_)) => sums([0.01, 0.11].map(|share| member(family, share)), layers),
        }
    }
}

/// Where the sets of indices of single layers are compared with one set: what they take on top weighs most where few values
/// are kept.
const SMALL_SHARE: f64 = 0.001;

/// The member that keeps this share, below 1.
fn member(family: Family, share: f64) -> CompressorSpec {
    let at = |ratio| family.at(ratio).ok();
    CompressionRatio::new(share).ok().and_then(at).unwrap_or_else(|| family.any())
}

/// Of n values.
fn kept(spec: &CompressorSpec, n: usize) -> u64 {
    spec.ratio().map_or(n, |ratio| ratio.keep(n)) as u64
}

/// Every value has its part: no ratio is open.
fn whole(spec: &CompressorSpec, layers: &Layers) -> CodecBytes {
    let Sizes { bytes, rounds } = Sizes::of(spec, layers.clone());
    let header = match spec.travels() {
        Travels::Sums(_) => 0,
        Travels::Gathers => header_of(spec),
    };
    let value_bytes = bytes.saturating_sub(header) as f64 / layers.values().max(1) as f64;
    CodecBytes { header_bytes: header as u64, value_bytes, rounds, ..CodecBytes::DENSE }
}

/// Kept values with their indices.
fn selected(spec: &CompressorSpec, layers: &Layers) -> CodecBytes {
    let (n, values) = (layers.values(), spec.value_type());
    let of = |n: usize| selection_bytes(n as u64, kept(spec, n), values);
    let payload = match spec.scope() {
        Scope::Bucket => of(n),
        Scope::Tensor => layers.shapes().map(|shape| of(shape.values())).sum(),
    };
    let rounds = Sizes::of(spec, layers.clone()).rounds;
    let bare = CodecBytes { header_bytes: 0, indices: IndexBytes::Least, value_bytes: values.bytes_each(), rounds };
    let more = (payload as f64 - bare.pairs(n as u64, kept(spec, n))).max(0.0);
    CodecBytes { header_bytes: header_of(spec) as u64 + more.round() as u64, ..bare }
}

/// Sums whose size grows with the share that is kept, by two members: of sketches most is the same for all.
fn sums([few, many]: [CompressorSpec; 2], layers: &Layers) -> CodecBytes {
    let n = layers.values();
    let [less, more] = [&few, &many].map(|spec| Sizes::of(spec, layers.clone()));
    let kept_less = kept(&few, n) as f64;
    let value_bytes = (more.bytes as f64 - less.bytes as f64) / (kept(&many, n) as f64 - kept_less).max(1.0);
    let header_bytes = (less.bytes as f64 - kept_less * value_bytes).max(0.0) as u64;
    CodecBytes { header_bytes, value_bytes, rounds: less.rounds, ..CodecBytes::DENSE }
}

/// Of a message that is gathered.
fn header_of(spec: &CompressorSpec) -> usize {
    header_bytes(spec.values().all().len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Shape;
    use proptest::prelude::*;

    /// Bytes that are charged and sent.
    fn charged_and_sent(text: &str, ratio: f64, lengths: &[usize]) -> (f64, f64) {
        let (family, layers) = (text.parse::<Family>().unwrap(), Layers::new(lengths).unwrap());
        let (spec, n) = (member(family, ratio), layers.values());
        let charged = Sizes::codec(family, &layers).pairs(n as u64, kept(&spec, n));
        (charged, Sizes::of(&spec, layers).bytes as f64)
    }

    fn ratios() -> impl Strategy<Value = f64> {
        (-3.0f64..-0.1).prop_map(|power| 10f64.powf(power))
    }

    const SELECTIONS: [&str; 3] = ["topk", "mstopk", "lwtopk"];

    proptest! {
        #[test]
        fn what_is_charged_is_sent(n in 0usize..3_000_000, ratio in ratios(), which in 0usize..3) {
            for values in ["", "+values(bf16)", "+values(int8)"] {
                let text = format!("{}(k=*)+ef(vanilla){values}", SELECTIONS[which]);
                let (charged, sent) = charged_and_sent(&text, ratio, &[n]);
                let off = if values == "+values(int8)" { 4.0 } else { 0.0 };
                prop_assert!((charged - sent).abs() <= off, "{text} at {ratio}: {charged} for {sent}");
            }
        }

        /// One set of all values, and one of each layer.
        #[test]
        fn layers_are_charged_as_they_are_sent(
            large in prop::collection::vec(100_000usize..1_000_000, 1..4),
            small in prop::collection::vec(0usize..500, 0..12),
            ratio in ratios(),
        ) {
            let lengths = [large, small].concat();
            let (charged, sent) = charged_and_sent("topk", ratio, &lengths);
            prop_assert_eq!(charged, sent);
            for values in ["", "+values(bf16)", "+values(int8)"] {
                let (charged, sent) = charged_and_sent(&format!("lwtopk(k=*){values}"), ratio, &lengths);
                prop_assert!((charged / sent - 1.0).abs() < 0.02, "{values} at {ratio}: {charged} for {sent}");
            }
        }
    }

    /// What has no ratio costs what it costs; sums of a share follow a line.
    #[test]
    fn others_are_charged_as_they_are_sent() {
        let n = 512 * 512;
        for text in ["none", "fp16", "eightbit+ef(vanilla)", "qsgd(s=7,norm=max)", "powersgd(rank=2)+ef(vanilla)"] {
            let layers = Layers::matrices(&[Shape { rows: 512, cols: 512 }]).unwrap();
            let family: Family = text.parse().unwrap();
            let (codec, sent) = (Sizes::codec(family, &layers), Sizes::of(&family.any(), layers));
            assert!((codec.pairs(n, n) - sent.bytes as f64).abs() < 1e-6, "{text}: {codec:?} for {sent:?}");
            assert_eq!(codec.rounds, sent.rounds, "{text}");
        }
        assert_eq!(Sizes::codec(Family::NONE, &Layers::fused(1000).unwrap()), CodecBytes::DENSE);
        for ratio in [0.001, 0.05, 0.5] {
            let (charged, sent) = charged_and_sent("sketched", ratio, &[1_000_000]);
            assert!((charged / sent - 1.0).abs() < 0.001, "{charged} for {sent}");
        }
    }

    /// AR-Topk broadcasts indices, and adds up values as they are.
    #[test]
    fn indices_are_charged_without_values() {
        let codec = Sizes::codec("topk".parse().unwrap(), &Layers::new(&[600_000, 400_000]).unwrap());
        // Header, k's number among the parameters, k, and the set: 8.6 bits per index.
        assert_eq!(codec.indices(1_000_000, 10_000), 32.0 + 8.0 + 4.0 + 10_705.0);
        assert_eq!((codec.values(10_000), codec.rounds), (40_000.0, 1));
    }

    fn sizes(text: &str) -> (usize, u32) {
        let layers = Layers::matrices(&[Shape { rows: 512, cols: 512 }]).unwrap();
        let found = Sizes::of(&text.parse().unwrap(), layers);
        (found.bytes, found.rounds)
    }

    /// What a kept value costs at CR 0.01: 1.1 bytes of index, and its own.
    #[test]
    fn a_kept_value_costs_little_more_than_itself() {
        let (n, kept) = (1_000_000, 10_000.0);
        for (values, most) in [("", 5.2), ("+values(bf16)", 3.2), ("+values(int8)", 2.2)] {
            for name in ["topk", "mstopk", "lwtopk"] {
                let spec = format!("{name}(k=0.01)+ef(vanilla){values}").parse().unwrap();
                let found = Sizes::of(&spec, Layers::new(&[n]).unwrap());
                let each = found.bytes as f64 / kept;
                assert!(each <= most && each > most - 0.25, "{name}{values}: {each}");
            }
        }
    }

    #[test]
    fn rounds_and_all_bytes_are_counted() {
        let values = 512 * 512;
        for (text, bytes, rounds) in [
            ("none", 4 * values, 1),
            ("fp16", 2 * values, 1),
            ("eightbit+ef(vanilla)", values, 1),
            ("qsgd(s=7,norm=max)", values / 2, 1),
            // Two factors of 512 rows and two columns.
            ("powersgd(rank=2)+ef(vanilla)", 2 * 512 * 2 * 4, 2),
        ] {
            let (found, in_rounds) = sizes(text);
            assert_eq!(in_rounds, rounds, "{text}");
            assert!(found >= bytes && found <= bytes + bytes / 50 + 200, "{text}: {found} bytes, not about {bytes}");
        }
        assert_eq!(sizes("inceptionn").1, 2, "its sizes go ahead");
        assert_eq!((sizes("fp16").0, sizes("powersgd(rank=1)").0), (2 * values, 2 * 512 * 4), "sums have no headers");
    }
}
