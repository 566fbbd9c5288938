//! What can be chosen: compressor, compression ratio, collective.

use crate::{CompressionRatio, Digest, Invalid};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

macro_rules! named_enum {
    ($(#[$doc:meta])* $name:ident, $what:literal, $allowed:literal, { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $text)] $variant),+
        }

        impl $name {
            /// Every value, in one fixed order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name used on the wire, in the API and on the command line.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = Invalid;
            fn from_str(text: &str) -> Result<Self, Invalid> {
                match text {
                    $($text => Ok(Self::$variant),)+
                    _ => Err(Invalid::text($what, text, $allowed)),
                }
            }
        }
    };
}

named_enum!(
    /// How values travel.
    Collective, "collective", "one of dense-ring, dense-tree, allgather, art-ring, art-tree", {
        /// Ring allreduce of the dense gradient.
        DenseRing = "dense-ring",
        /// Tree (reduce, then broadcast) allreduce of the dense gradient.
        DenseTree = "dense-tree",
        /// Each rank's (index, value) pairs go to every rank.
        Allgather = "allgather",
        /// AR-Topk: one rank's indices are broadcast, then values are summed by ring allreduce.
        ArtRing = "art-ring",
        /// AR-Topk with a tree allreduce.
        ArtTree = "art-tree",
    }
);

impl Collective {
    /// Whether the whole gradient travels.
    pub const fn is_dense(self) -> bool {
        matches!(self, Self::DenseRing | Self::DenseTree)
    }

    /// Whether this is AR-Topk, which needs a [`Selection`].
    pub const fn is_art(self) -> bool {
        matches!(self, Self::ArtRing | Self::ArtTree)
    }
}

named_enum!(
    /// How values are selected.
    Compressor, "compressor", "one of none, topk, lwtopk, mstopk", {
        /// Nothing is left out.
        None = "none",
        /// Exact top-k over the fused gradient.
        TopK = "topk",
        /// Exact top-k in each layer.
        LwTopK = "lwtopk",
        /// Top-k by threshold estimation in 25 rounds (MSTopk).
        MsTopK = "mstopk",
    }
);

named_enum!(
    /// How AR-Topk chooses the rank whose indices count (Algorithm 1).
    Selection, "worker selection", "one of star, var", {
        /// Round robin: rank = step mod N.
        Star = "star",
        /// The rank with the largest ‖g‖².
        Var = "var",
    }
);

/// Compressor, ratio and collective that fit together. Error feedback is always on when compressing.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawStrategy", into = "RawStrategy")]
pub struct Strategy {
    compressor: Compressor,
    cr: CompressionRatio,
    collective: Collective,
    selection: Option<Selection>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStrategy {
    compressor: Compressor,
    cr: CompressionRatio,
    collective: Collective,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    selection: Option<Selection>,
}

impl TryFrom<RawStrategy> for Strategy {
    type Error = Invalid;
    fn try_from(raw: RawStrategy) -> Result<Self, Invalid> {
        Self::new(raw.compressor, raw.cr, raw.collective, raw.selection)
    }
}

impl From<Strategy> for RawStrategy {
    fn from(s: Strategy) -> Self {
        Self { compressor: s.compressor, cr: s.cr, collective: s.collective, selection: s.selection }
    }
}

impl Strategy {
    /// What a job runs before anything is decided, and the fallback: dense over a ring.
    pub const DENSE_RING: Self = Self {
        compressor: Compressor::None,
        cr: CompressionRatio::DENSE,
        collective: Collective::DenseRing,
        selection: None,
    };

    /// Checks that the parts fit: dense collectives take compressor `none` and CR 1, the others a real
    /// compressor and CR below 1; a selection is given exactly for AR-Topk; LWTopk travels by allgather only,
    /// since ranks must share one index set under AR-Topk's fused k.
    pub fn new(
        compressor: Compressor,
        cr: CompressionRatio,
        collective: Collective,
        selection: Option<Selection>,
    ) -> Result<Self, Invalid> {
        let refuse = |why: &str| Err(Invalid::Combination(format!("{collective} with {compressor} at CR {cr}: {why}")));
        if collective.is_dense() != (compressor == Compressor::None) {
            return refuse("dense collectives take compressor none, the others a real one");
        }
        if collective.is_dense() != cr.is_dense() {
            return refuse("dense collectives take CR 1, the others less");
        }
        if collective.is_art() != selection.is_some() {
            return refuse("a worker selection (star, var) is given exactly for art-ring and art-tree");
        }
        if collective.is_art() && compressor == Compressor::LwTopK {
            return refuse("lwtopk travels by allgather only");
        }
        Ok(Self { compressor, cr, collective, selection })
    }

    /// Dense over a ring or tree. Refuses sparse collectives.
    pub fn dense(collective: Collective) -> Result<Self, Invalid> {
        Self::new(Compressor::None, CompressionRatio::DENSE, collective, None)
    }

    /// The compressor.
    pub const fn compressor(&self) -> Compressor {
        self.compressor
    }

    /// The compression ratio; 1 when dense.
    pub const fn cr(&self) -> CompressionRatio {
        self.cr
    }

    /// The collective.
    pub const fn collective(&self) -> Collective {
        self.collective
    }

    /// AR-Topk's worker selection.
    pub const fn selection(&self) -> Option<Selection> {
        self.selection
    }

    /// Who selects values, by what: what a gain belongs to.
    pub const fn selector(&self) -> Selector {
        Selector { compressor: self.compressor, selection: self.selection }
    }

    /// Whether nothing is compressed.
    pub const fn is_dense(&self) -> bool {
        self.collective.is_dense()
    }

    /// Digest of the canonical text.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_string())
    }
}

impl fmt::Display for Strategy {
    /// Canonical text, read back by [`FromStr`]: `none@1/dense-ring`, `topk@0.01/art-ring:star`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}/{}", self.compressor, self.cr, self.collective)?;
        match self.selection {
            Some(selection) => write!(f, ":{selection}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Strategy {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let help = "COMPRESSOR@CR/COLLECTIVE[:SELECTION], for example topk@0.01/art-ring:star";
        let bad = || Invalid::text("strategy", text, help);
        let (compressor, rest) = text.split_once('@').ok_or_else(bad)?;
        let (cr, rest) = rest.split_once('/').ok_or_else(bad)?;
        let (collective, selection) = match rest.split_once(':') {
            Some((collective, selection)) => (collective, Some(selection.parse()?)),
            None => (rest, None),
        };
        let cr = CompressionRatio::new(cr.parse().map_err(|_| bad())?)?;
        Self::new(compressor.parse()?, cr, collective.parse()?, selection)
    }
}

/// A way of selecting values: each rank for itself, or under AR-Topk one rank for all. What the others lose by that
/// is not small (Algorithm 1 keeps every rank's own values at one rank's indices), so a gain belongs to a selector and
/// not to a compressor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Selector {
    /// By what.
    pub compressor: Compressor,
    /// How the rank that selects for all is found; None: each selects for itself.
    pub selection: Option<Selection>,
}

impl From<Compressor> for Selector {
    /// Each rank selects for itself.
    fn from(compressor: Compressor) -> Self {
        Self { compressor, selection: None }
    }
}

impl fmt::Display for Selector {
    /// `topk`, `topk:star`; read back by [`FromStr`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.selection {
            None => self.compressor.fmt(f),
            Some(selection) => write!(f, "{}:{selection}", self.compressor),
        }
    }
}

impl FromStr for Selector {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (compressor, selection) = match text.split_once(':') {
            Some((compressor, selection)) => (compressor, Some(selection.parse()?)),
            None => (text, None),
        };
        Ok(Self { compressor: compressor.parse()?, selection })
    }
}

impl TryFrom<String> for Selector {
    type Error = Invalid;

    fn try_from(text: String) -> Result<Self, Invalid> {
        text.parse()
    }
}

impl From<Selector> for String {
    fn from(selector: Selector) -> Self {
        selector.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::{Collective, CompressionRatio, Compressor, Selection, Selector, Strategy};
    use proptest::prelude::{prop_assert_eq, proptest};

    #[test]
    fn parts_must_fit() {
        for bad in [
            "none@0.1/dense-ring",
            "topk@1/dense-ring",
            "topk@1/allgather",
            "none@1/allgather",
            "topk@0.1/art-ring",
            "topk@0.1/allgather:star",
            "lwtopk@0.1/art-tree:var",
            "topk@0/allgather",
            "topk@NaN/allgather",
            "topk/allgather",
        ] {
            assert!(bad.parse::<Strategy>().is_err(), "{bad} was accepted");
        }
    }

    proptest! {
        #[test]
        fn text_and_json_round_trip(c in 1e-6..1.0f64, compressor in 1usize..4, collective in 2usize..5, var: bool) {
            let collective = Collective::ALL[collective];
            let selection = collective.is_art().then_some(if var { Selection::Var } else { Selection::Star });
            let cr = CompressionRatio::new(c).unwrap();
            let Ok(strategy) = Strategy::new(Compressor::ALL[compressor], cr, collective, selection) else {
                return Ok(());
            };
            prop_assert_eq!(strategy.to_string().parse::<Strategy>().unwrap(), strategy);
            let json = serde_json::to_string(&strategy).unwrap();
            let back: Strategy = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(back, strategy);
            prop_assert_eq!(back.digest(), strategy.digest());
            let selector = strategy.selector();
            prop_assert_eq!(selector.to_string().parse::<Selector>().unwrap(), selector);
        }
    }
}
