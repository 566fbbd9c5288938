//! A compressor whose ratio is left open.

use super::compressors::COMPRESSORS;
use super::params::{ANY, ANY_SHARE};
use super::{CompressorInfo, CompressorSpec, Nature, OnRequest, SpecError, find, parse};
use crate::CompressionRatio;
use crate::text::serde_as_text;
use std::fmt;
use std::str::FromStr;

/// A compressor with its parameters, memory and the rest, but without the share of values that it keeps:
/// `topk(k=*)+ef(vanilla)`, `powersgd(rank=2)+ef(vanilla)`, `fp16`. What message sizes and curves over the ratio belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Family(CompressorSpec);

/// Stands for any share where a text needs one.
const SOME_SHARE: &str = "0.5";

impl Family {
    /// Nothing is compressed.
    pub const NONE: Self = Self(CompressorSpec::NONE);

    /// Whether it has a member for every ratio below 1, or a single one.
    pub fn has_ratio(&self) -> bool {
        self.0.place_of_k().is_some_and(|place| self.0.values.number(place) == ANY_SHARE)
    }

    /// The member that keeps this share of the values; the only one where there is no share.
    ///
    /// # Errors
    /// A share of 1 is no compression.
    pub fn at(&self, ratio: CompressionRatio) -> Result<CompressorSpec, SpecError> {
        let mut spec = self.0;
        if let Some(place) = self.0.place_of_k().filter(|_| self.has_ratio()) {
            if ratio.is_dense() {
                return Err(SpecError::range(spec.compressor.name, &spec.compressor.params[place], "1.0"));
            }
            spec.values.set(place, ratio.get());
        }
        Ok(spec)
    }

    /// The compressor's name.
    pub fn name(&self) -> &'static str {
        self.0.compressor.name
    }

    /// Whether nothing is compressed.
    pub fn is_none(&self) -> bool {
        self.0 == CompressorSpec::NONE
    }

    /// What a text in a list of candidates stands for. A name alone, or an alias of it, is all that competes by default under it, or
    /// else the compressor as [`further_compressors`] has it; whatever else is written is one family.
    ///
    /// # Errors
    /// As for the text itself.
    pub fn named(text: &str) -> Result<Vec<Self>, SpecError> {
        let family: Result<Self, _> = text.parse();
        if !is_name_alone(text) || text.contains(['@', '/']) {
            return Ok(vec![family?]);
        }
        let name = find(text.trim())?.name;
        let of_name = |all: Vec<Self>| all.into_iter().filter(|family| family.name() == name).collect::<Vec<_>>();
        let candidates = of_name(default_compressors());
        let known = if candidates.is_empty() { of_name(further_compressors()) } else { candidates };
        if known.is_empty() { Ok(vec![family?]) } else { Ok(known) }
    }

    /// Any member: its travels, scope and memory are those of all.
    pub fn any(&self) -> CompressorSpec {
        let half = CompressionRatio::new(0.5).unwrap_or(CompressionRatio::DENSE);
        self.at(half).unwrap_or(self.0)
    }
}

/// Compressors that compete by default, in the order of [`COMPRESSORS`]: halves, 8 and 4 bits, the paper's three ways of selecting
/// values, PowerSGD. Which of them are candidates is for a job's policy and the controller's settings.
pub fn default_compressors() -> Vec<Family> {
    let texts = COMPRESSORS.iter().flat_map(|compressor| compressor.candidates);
    texts.filter_map(|text| text.parse().ok()).collect()
}

/// What trainers offer of the other compressors ([`OnRequest`]): candidates where a job's policy or the controller's settings
/// name them.
pub fn further_compressors() -> Vec<Family> {
    let others = COMPRESSORS.iter().filter(|compressor| compressor.candidates.is_empty());
    let families = |compressor: &&CompressorInfo| match compressor.on_request {
        OnRequest::Usual => usual(compressor.name).into_iter().collect(),
        OnRequest::As(texts) => texts.iter().filter_map(|text| text.parse().ok()).collect(),
        OnRequest::No(_) => Vec::new(),
    };
    others.flat_map(families).collect()
}

fn usual(name: &str) -> Option<Family> {
    let open: Family = format!("{name}(k={ANY})").parse().or_else(|_| name.parse()).ok()?;
    match open.any().nature() {
        Nature::Unbiased(_) => Some(open),
        _ => format!("{open}+ef(vanilla)").parse().ok(),
    }
}

impl From<CompressorSpec> for Family {
    fn from(spec: CompressorSpec) -> Self {
        Self(spec.with_k(ANY_SHARE))
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Family {
    type Err = SpecError;

    /// Reads what `Display` writes, a member (whose ratio does not matter) or what leaves k out; the name alone of a compressor that
    /// keeps k values stands for that with `ef(vanilla)`.
    fn from_str(text: &str) -> Result<Self, SpecError> {
        let family = Self::from(parse::read(text, Some(SOME_SHARE))?);
        if is_name_alone(text) && family.0.place_of_k().is_some() {
            return format!("{family}+ef(vanilla)").parse();
        }
        Ok(family)
    }
}

/// Whether a text says neither parameters nor parts.
pub fn is_name_alone(text: &str) -> bool {
    !text.contains(['(', '+'])
}

serde_as_text!(Family);

#[cfg(test)]
mod tests {
    use super::*;

    fn family(text: &str) -> Family {
        text.parse().unwrap()
    }

    #[test]
    fn candidates_are_canonical_and_of_their_own_compressor() {
        for compressor in COMPRESSORS {
            for text in compressor.candidates {
                let family = family(text);
                assert_eq!((family.name(), family.to_string().as_str()), (compressor.name, *text));
            }
        }
        let count: usize = COMPRESSORS.iter().map(|compressor| compressor.candidates.len()).sum();
        assert_eq!(default_compressors().len(), count);
        let further = further_compressors();
        // What a report of a trainer may list, dense and what a script names among them: the controller refuses more.
        assert!(default_compressors().len() + further.len() < 48);
        let names: Vec<String> = further.iter().map(ToString::to_string).collect();
        for name in ["terngrad", "dgc(k=*)+ef(vanilla)", "efsignsgd+ef(vanilla)", "sketched(k=*)+ef(vanilla)"] {
            assert!(names.iter().any(|own| own == name), "{name} is not among {names:?}");
        }
        assert!(further.iter().all(|family| !matches!(family.name(), "none" | "topk")), "{names:?}");
    }

    #[test]
    fn every_compressor_is_offered_or_says_why_not() {
        let offered: Vec<Family> = default_compressors().into_iter().chain(further_compressors()).collect();
        for compressor in COMPRESSORS.iter().filter(|compressor| compressor.name != "none") {
            let own: Vec<_> = offered.iter().filter(|family| family.name() == compressor.name).collect();
            match compressor.on_request {
                OnRequest::No(why) => assert!(own.is_empty() && !why.is_empty(), "{own:?}"),
                OnRequest::As(texts) => assert_eq!(own.iter().map(ToString::to_string).collect::<Vec<_>>(), texts),
                OnRequest::Usual => assert!(!own.is_empty(), "{}", compressor.name),
            }
            for family in own {
                let spec = family.any().trainable().unwrap();
                // What is biased is fed back, but for signs without a magnitude.
                assert!(!spec.is_biased_without_memory() || family.name().starts_with("sign"), "{family}");
            }
        }
    }

    #[test]
    fn members_of_every_ratio_are_one_family() {
        let of = |text: &str| Family::from(text.parse::<CompressorSpec>().unwrap());
        assert_eq!(of("topk(k=0.1)+ef(vanilla)"), of("topk(k=0.001)+ef(vanilla)"));
        assert_eq!(of("topk(k=0.1)+ef(vanilla)").to_string(), "topk(k=*)+ef(vanilla)");
        assert_ne!(of("topk(k=0.1)"), of("topk(k=0.1)+ef(vanilla)"));
        assert_ne!(of("topk(k=10)"), of("topk(k=100)"), "numbers of values are no ratios");
        assert!(!of("topk(k=10)").has_ratio() && !of("fp16").has_ratio());
    }

    #[test]
    fn families_round_trip_and_give_their_members() {
        for text in
            ["topk(k=*)+ef(vanilla)", "sketched(k=*,rows=3)", "fp16", "powersgd(rank=2)+ef(vanilla)", "topk(k=7)"]
        {
            assert_eq!(family(text).to_string(), text);
        }
        let ratio = CompressionRatio::new(0.033).unwrap();
        assert_eq!(family("lwtopk(k=*)+ef(vanilla)").at(ratio).unwrap().to_string(), "lwtopk(k=0.033)+ef(vanilla)");
        assert_eq!(family("fp16").at(ratio).unwrap().to_string(), "fp16");
        let error = family("topk(k=*)").at(CompressionRatio::DENSE).unwrap_err().to_string();
        assert!(error.contains("k of topk") && error.contains("below 1"), "{error}");
    }

    #[test]
    fn a_name_alone_stands_for_error_feedback() {
        assert_eq!(family("topk"), family("topk(k=0.1)+ef(vanilla)"));
        assert_eq!(family("none"), Family::NONE);
        let error = "topkk".parse::<Family>().unwrap_err().to_string();
        assert!(error.contains("did you mean topk?"), "{error}");
        assert!("powersgd".parse::<Family>().is_err(), "its rank must be given");
    }

    #[test]
    fn k_may_be_left_out_and_errors_are_about_what_was_typed() {
        assert_eq!(family("topk+ef(efsign)"), family("topk(k=*)+ef(efsign)"));
        assert_eq!(family("sketched(rows=3)"), family("sketched(k = *, rows=3)"));
        assert_eq!(family("adaq"), family("adaptivethreshold"));
        let error = |text: &str| text.parse::<Family>().unwrap_err().to_string();
        let dithering = error("dithering");
        assert!(
            dithering.contains("without k") && dithering.contains("1 to 127") && !dithering.contains("0.5"),
            "{dithering}"
        );
        let open = error("dithering(k=*)");
        assert!(open.contains("to \"*\"") && !open.contains("0.5"), "{open}");
    }

    #[test]
    fn names_in_lists_stand_for_what_competes_under_them() {
        let named = |text: &str| -> Vec<String> {
            Family::named(text).unwrap_or_else(|e| panic!("{text}: {e}")).iter().map(ToString::to_string).collect()
        };
        assert_eq!(named("u8bit"), named("eightbit"));
        assert!(named("eightbit").iter().all(|text| text.starts_with("eightbit") && text.contains("+ef(")));
        assert_eq!(named("eightbit()"), ["eightbit"], "with parentheses it is what is written");
        assert_eq!(named("topk"), ["topk(k=*)+ef(vanilla)"]);
        assert!(named("powersgd").len() > 1);
        assert_eq!(named("dgc"), ["dgc(k=*)+ef(vanilla)"]);
        assert_eq!(named("terngrad"), ["terngrad"]);
        assert_eq!(named("qsgd(s=4)"), ["qsgd(s=4)"]);
        assert_eq!(named("signsgd"), ["signsgd"]);
        assert_eq!(Family::named("dense").unwrap(), [Family::NONE]);
        assert_eq!(named("8bit"), named("eightbit"));
        for (text, words) in [
            ("topk@0.01", "topk(k=0.01)+ef(vanilla)"),
            ("topkk", "did you mean topk?"),
            ("dithering(partition=natural)", "without k"),
            ("fp16/allgather", "at \"/allgather\", expected a compressor alone, without a collective"),
        ] {
            let error = Family::named(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
