//! What can be chosen: a compressor with its parameters and memory, and how its messages travel.

use crate::spec::{CompressorSpec, Family, SpecError, Travels, ValueType};
use crate::text::serde_as_text;
use crate::{CompressionRatio, Digest, Invalid, words};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

macro_rules! named_enum {
    ($(#[$doc:meta])* $name:ident, $what:literal, { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        words! {
            $(#[$doc])*
            #[derive(Serialize, Deserialize)]
            pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $variant = $text),+ }
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
                    _ => Err(Invalid::unknown($what, text, &[$($text),+])),
                }
            }
        }
    };
}

named_enum!(
    /// How values travel.
    Collective, "collective", {
        /// Ring allreduce of what adds up: the dense gradient, or messages of a compressor whose elements sum.
        DenseRing = "dense-ring",
        /// Tree (reduce, then broadcast) allreduce of what adds up.
        DenseTree = "dense-tree",
        /// Each rank's message goes to every rank.
        Allgather = "allgather",
        /// AR-Topk: one rank's indices are broadcast, then values are summed by ring allreduce.
        ArtRing = "art-ring",
        /// AR-Topk with a tree allreduce.
        ArtTree = "art-tree",
    }
);

/// What a collective does with the ranks' messages, whatever way they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Adds them up on the way.
    Allreduce,
    /// Brings each to every rank.
    Allgather,
    /// AR-Topk: broadcasts one rank's indices, then adds up the values at them.
    ArTopk,
}

impl Collective {
    /// What it does with messages.
    pub const fn pattern(self) -> Pattern {
        match self {
            Self::DenseRing | Self::DenseTree => Pattern::Allreduce,
            Self::Allgather => Pattern::Allgather,
            Self::ArtRing | Self::ArtTree => Pattern::ArTopk,
        }
    }

    /// Whether messages are added up on the way, as the dense gradient is.
    pub const fn is_allreduce(self) -> bool {
        matches!(self.pattern(), Pattern::Allreduce)
    }

    /// Whether this is AR-Topk, which needs a [`Selection`].
    pub const fn is_art(self) -> bool {
        matches!(self.pattern(), Pattern::ArTopk)
    }
}

named_enum!(
    /// How AR-Topk chooses the rank whose indices count (Algorithm 1).
    Selection, "worker selection", {
        /// Round robin: rank = step mod N.
        Star = "star",
        /// The rank with the largest ‖g‖².
        Var = "var",
    }
);

/// A compressor and a collective that fit together.
///
/// Its canonical text is `SPEC/COLLECTIVE`, and `SPEC/COLLECTIVE:SELECTION` for AR-Topk: `none/dense-ring`,
/// `fp16/dense-tree`, `topk(k=0.01)+ef(vanilla)/art-ring:star`. A compressor alone takes the collective that is [`Self::usual`] for
/// it. Texts and JSON objects of earlier builds
/// (`topk@0.01/allgather`, which had error feedback without saying so) are read, too.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Strategy {
    spec: CompressorSpec,
    collective: Collective,
    selection: Option<Selection>,
}

/// Most bytes of a strategy's canonical text.
pub const MAX_STRATEGY_TEXT: usize = 255;

impl Strategy {
    /// What a job runs before anything is decided, and the fallback: dense over a ring.
    pub const DENSE_RING: Self =
        Self { spec: CompressorSpec::NONE, collective: Collective::DenseRing, selection: None };

    /// Checks that the parts fit: messages that add up travel by an allreduce, others by an allgather; AR-Topk takes a
    /// compressor that selects values ([`CompressorSpec::selects`]), and exactly it a selection.
    pub fn new(spec: CompressorSpec, collective: Collective, selection: Option<Selection>) -> Result<Self, Invalid> {
        if let Some(why) = misfit(&spec, collective, selection) {
            return Err(Invalid::Combination(format!("{spec} cannot travel by {collective}: {why}")));
        }
        let strategy = Self { spec, collective, selection };
        if strategy.to_string().len() > MAX_STRATEGY_TEXT {
            return Err(Invalid::Combination(format!(
                "{strategy} has more than {MAX_STRATEGY_TEXT} characters: leave out what is at its default"
            )));
        }
        Ok(strategy)
    }

    /// The same without a reason where the parts do not fit: for whoever tries every pair.
    pub fn fitting(spec: CompressorSpec, collective: Collective, selection: Option<Selection>) -> Option<Self> {
        if misfit(&spec, collective, selection).is_some() {
            return None;
        }
        Self::new(spec, collective, selection).ok()
    }

    /// Dense over a ring or tree. Refuses other collectives.
    pub fn dense(collective: Collective) -> Result<Self, Invalid> {
        Self::new(CompressorSpec::NONE, collective, None)
    }

    /// The compressor by the collective that is usual for it: a ring for what adds up, else an allgather.
    pub fn usual(spec: CompressorSpec) -> Result<Self, Invalid> {
        let sums = matches!(spec.travels(), Travels::Sums(_));
        Self::new(spec, if sums { Collective::DenseRing } else { Collective::Allgather }, None)
    }

    /// The compressor with its parameters, memory and the rest.
    pub const fn spec(&self) -> &CompressorSpec {
        &self.spec
    }

    /// The compressor without its ratio.
    pub fn family(&self) -> Family {
        self.spec.into()
    }

    /// The share of values that is kept; 1 where none are left out.
    pub fn cr(&self) -> CompressionRatio {
        self.spec.ratio().unwrap_or(CompressionRatio::DENSE)
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
    pub fn selector(&self) -> Selector {
        Selector { family: self.family(), selection: self.selection }
    }

    /// Whether nothing is compressed.
    pub fn is_dense(&self) -> bool {
        self.spec == CompressorSpec::NONE
    }

    /// Digest of the canonical text.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_string())
    }
}

impl fmt::Debug for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why the parts do not fit.
fn misfit(spec: &CompressorSpec, collective: Collective, selection: Option<Selection>) -> Option<&'static str> {
    let sums = matches!(spec.travels(), Travels::Sums(_));
    if collective.is_art() && spec.value_type() != ValueType::F32 {
        return Some("AR-Topk sums values, and sums them as f32; leave out values(...), or take allgather");
    }
    if collective.is_art() && !spec.selects() {
        return Some(match sums {
            true => {
                "AR-Topk sums values at one rank's indices, and this compressor has none; take dense-ring or dense-tree"
            }
            false => "AR-Topk needs a compressor that selects k values, as topk, lwtopk or dgc; take allgather",
        });
    }
    if collective.is_allreduce() && !sums {
        return Some("its messages do not add up; take allgather");
    }
    if collective == Collective::Allgather && sums {
        return Some("its messages add up on the way; take dense-ring or dense-tree");
    }
    (collective.is_art() != selection.is_some())
        .then_some("a worker selection (star, var) is given exactly for art-ring and art-tree")
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.spec, self.collective)?;
        match self.selection {
            Some(selection) => write!(f, ":{selection}"),
            None => Ok(()),
        }
    }
}

const FORM: &str = "COMPRESSOR[+PARTS][/COLLECTIVE[:SELECTION]], for example topk(k=0.01)+ef(vanilla)/art-ring:star";

fn not_read(error: SpecError) -> Invalid {
    Invalid::Combination(format!("failed to {error}"))
}

fn spec(text: &str) -> Result<CompressorSpec, Invalid> {
    text.parse().map_err(not_read)
}

/// `COMPRESSOR@CR`, as earlier builds wrote it: what compresses has error feedback.
fn spec_before(compressor: &str, cr: &str) -> Option<Result<CompressorSpec, Invalid>> {
    let cr: f64 = cr.parse().ok()?;
    Some(match compressor {
        "none" if cr == 1.0 => Ok(CompressorSpec::NONE),
        "none" => Err(Invalid::Combination(format!("none at CR {cr}: it keeps everything, which is CR 1"))),
        "topk" | "lwtopk" | "mstopk" => {
            let family = |cr: CompressionRatio| compressor.parse::<Family>().and_then(|family| family.at(cr));
            CompressionRatio::new(cr).and_then(|cr| family(cr).map_err(not_read))
        }
        other => spec(other).and_then(|spec| {
            let why = format!("{spec} takes no ratio behind an @: write its parameters alone");
            Err(Invalid::Combination(why))
        }),
    })
}

impl FromStr for Strategy {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let bad = || Invalid::text("strategy", text, FORM);
        // Earlier builds kept what a user had named so.
        let (compressor, how) = match text.rsplit_once(" over ").or_else(|| text.rsplit_once('/')) {
            Some((compressor, how)) => (compressor, Some(how)),
            None => (text, None),
        };
        let spec = match compressor.split_once('@') {
            Some((name, cr)) => spec_before(name, cr).ok_or_else(bad)??,
            None => spec(compressor)?,
        };
        let Some(how) = how else { return Self::usual(spec) };
        let (collective, selection) = match how.split_once(':') {
            Some((collective, selection)) => (collective, Some(selection.parse()?)),
            None => (how, None),
        };
        Self::new(spec, collective.parse()?, selection)
    }
}

/// As earlier builds wrote it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Before {
    compressor: String,
    cr: f64,
    collective: String,
    #[serde(default)]
    selection: Option<String>,
}

/// A strategy as it may stand in JSON.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Before(Before),
}

/// The text of a strategy in JSON, unchecked: a string, or the object of earlier builds.
pub fn strategy_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(match Written::deserialize(deserializer)? {
        Written::Text(text) => text,
        Written::Before(Before { compressor, cr, collective, selection }) => {
            let selection = selection.map_or(String::new(), |selection| format!(":{selection}"));
            format!("{compressor}@{cr}/{collective}{selection}")
        }
    })
}

impl<'de> Deserialize<'de> for Strategy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        strategy_text(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Serialize for Strategy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A way of selecting values: each rank for itself, or under AR-Topk one rank for all. What the others lose by that
/// is not small (Algorithm 1 keeps every rank's own values at one rank's indices), so a gain belongs to a selector and
/// not to a compressor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selector {
    /// By what.
    pub family: Family,
    /// How the rank that selects for all is found; None: each selects for itself.
    pub selection: Option<Selection>,
}

impl From<Family> for Selector {
    /// Each rank selects for itself.
    fn from(family: Family) -> Self {
        Self { family, selection: None }
    }
}

impl fmt::Display for Selector {
    /// `topk(k=*)+ef(vanilla)`, `topk(k=*)+ef(vanilla):star`; read back by [`FromStr`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.selection {
            None => self.family.fmt(f),
            Some(selection) => write!(f, "{}:{selection}", self.family),
        }
    }
}

impl FromStr for Selector {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (family, selection) = match text.split_once(':') {
            Some((family, selection)) => (family, Some(selection.parse()?)),
            None => (text, None),
        };
        let family = family.parse().map_err(not_read)?;
        Ok(Self { family, selection })
    }
}

serde_as_text!(Selector);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::compressors::COMPRESSORS;
    use proptest::prelude::{prop_assert_eq, proptest};

    fn strategy(text: &str) -> Strategy {
        text.parse().unwrap()
    }

    #[test]
    fn parts_must_fit() {
        let all = format!("there are {}", Collective::WORDS.join(", "));
        for (bad, why) in [
            ("none/allgather", "dense-ring"),
            ("fp16/allgather", "add up"),
            ("none/art-ring:star", "dense-ring or dense-tree"),
            ("qsgd(s=4)/dense-ring", "take allgather"),
            ("topk(k=0.1)/dense-tree", "take allgather"),
            ("topk(k=0.1)/art-ring", "worker selection"),
            ("topk(k=0.1)/allgather:star", "worker selection"),
            ("threshold(v=1)/art-tree:var", "selects k values"),
            ("artopk(k=0.1)+ef(vanilla)", "topk(k=...)+ef(vanilla)/art-ring:star"),
            ("qsgd(s=4)/art-ring:star", "selects k values"),
            ("topk@0,1", "COMPRESSOR"),
            ("topkk(k=0.1)/allgather", "did you mean topk?"),
            ("topk(k=0.1)/allgathr", "did you mean allgather?"),
            ("topk(k=0.1)/Art-Rings:star", "did you mean art-ring?"),
            ("topk(k=0.1)/art-ring:sta", "did you mean star?"),
            ("topk(k=0.1)/zebra", all.as_str()),
            ("topk(k=0)/allgather", "above 0"),
            ("topk(k=*)/allgather", "above 0"),
        ] {
            let error = bad.parse::<Strategy>().expect_err(bad).to_string();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    #[test]
    fn texts_of_before_and_compressors_alone_are_read() {
        for (before, now) in [
            ("topk(k=0.1)+ef", "topk(k=0.1)+ef(vanilla)/allgather"),
            ("fp16", "fp16/dense-ring"),
            ("topk@0.1", "topk(k=0.1)+ef(vanilla)/allgather"),
            ("none@1/dense-ring", "none/dense-ring"),
            ("none@1/dense-tree", "none/dense-tree"),
            ("topk@0.01/art-ring:star", "topk(k=0.01)+ef(vanilla)/art-ring:star"),
            ("lwtopk@0.033/allgather", "lwtopk(k=0.033)+ef(vanilla)/allgather"),
            ("mstopk@0.004/art-tree:var", "mstopk(k=0.004)+ef(vanilla)/art-tree:var"),
            ("qsgd(s=16) over allgather", "qsgd(s=16)/allgather"),
            ("fp16 over dense-ring", "fp16/dense-ring"),
        ] {
            assert_eq!(strategy(before).to_string(), now);
        }
        for bad in [
            "none@0.1/dense-ring",
            "topk@1/allgather",
            "topk@NaN/allgather",
            "topk@0/allgather",
            "text@1/allgather",
            "fp16@0.1/dense-ring",
        ] {
            assert!(bad.parse::<Strategy>().is_err(), "{bad} was accepted");
        }
        let json = r#"{"compressor":"topk","cr":0.01,"collective":"art-ring","selection":"star"}"#;
        assert_eq!(serde_json::from_str::<Strategy>(json).unwrap(), strategy("topk@0.01/art-ring:star"));
        assert_eq!("topk:var".parse::<Selector>().unwrap(), strategy("topk@0.01/art-ring:var").selector());
    }

    #[test]
    fn every_compressor_has_a_usual_strategy() {
        for info in COMPRESSORS {
            let required = info.params.iter().filter(|param| param.default.is_none());
            let given: Vec<String> = required
                .map(|param| format!("{}={}", param.name, if param.kind.admits(3.0) { 3.0 } else { 0.5 }))
                .collect();
            let spec: CompressorSpec = format!("{}({})", info.name, given.join(",")).parse().unwrap();
            let usual = Strategy::usual(spec).unwrap();
            assert_eq!(strategy(&usual.to_string()), usual);
        }
    }

    #[test]
    fn a_text_of_any_length_is_no_strategy() {
        let parts = "+ef(sgc,alpha=0.12345678901234567,epsilon=0.12345678901234567)+nesterov(mu=0.12345678901234567)+scope(tensor)+checksum(crc32c)\
                     +nonfinite(skip)+seed(18446744073709551615)";
        let spec =
            "sidco(k=0.12345678901234567,fit=gamma,first=0.12345678901234567,tolerance=0.12345678901234567,every=7)";
        let error = format!("{spec}{parts}/allgather").parse::<Strategy>().unwrap_err().to_string();
        assert!(error.contains("255 characters"), "{error}");
    }

    proptest! {
        #[test]
        fn text_and_json_round_trip(c in 1e-6..1.0f64, compressor in 0usize..3, collective in 2usize..5, var: bool) {
            let collective = Collective::ALL[collective];
            let selection = collective.is_art().then_some(if var { Selection::Var } else { Selection::Star });
            let name = ["topk", "lwtopk", "mstopk"][compressor];
            let spec = format!("{name}(k={c})+ef(vanilla)").parse().unwrap();
            let Ok(strategy) = Strategy::new(spec, collective, selection) else { return Ok(()) };
            prop_assert_eq!(strategy.to_string().parse::<Strategy>().unwrap(), strategy);
            let json = serde_json::to_string(&strategy).unwrap();
            let back: Strategy = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(back, strategy);
            prop_assert_eq!(back.digest(), strategy.digest());
            prop_assert_eq!(back.cr().get(), c);
            let selector = strategy.selector();
            prop_assert_eq!(selector.to_string().parse::<Selector>().unwrap(), selector);
            prop_assert_eq!(selector.family.at(strategy.cr()).unwrap(), *strategy.spec());
        }
    }
}
