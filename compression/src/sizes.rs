//! What a compressor sends in a step, before any values are seen.

use crate::codec::Size;
use crate::pipeline::{Member, Pipeline};
use crate::{Build, Layers};
use flexcomm_domain::spec::{CompressorSpec, Travels};

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
        // A memory holds back values and sends none.
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Shape;

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
