//! The textual form.

use super::params::{ANY, Kind, Param, Values};
use super::parts::{MEMORIES, MOMENTA};
use super::{Checksum, CompressorSpec, NonFinite, Scope, SpecError, Travels, ValueType, compressors, find};
use std::str::FromStr;

/// Longest text that is read.
const MOST_BYTES: usize = 4096;

/// The memory of `+ef` without a name.
const USUAL_MEMORY: &str = "vanilla";

/// Of what may come after a compressor.
pub(super) fn part_names() -> impl Iterator<Item = &'static str> {
    let words = WORD_PARTS.iter().map(|part| part.name);
    ["ef", "seed"].into_iter().chain(MOMENTA.iter().map(|momentum| momentum.name)).chain(words)
}

/// `name(word, key=value, ...)` as written.
struct Term<'a> {
    name: &'a str,
    /// The first argument when it has no key.
    word: Option<&'a str>,
    given: Vec<(&'a str, &'a str)>,
}

fn syntax(text: &str, rest: &str, expected: &'static str) -> SpecError {
    let short = |s: &str| s.chars().take(80).collect::<String>();
    SpecError::Syntax { text: short(text), rest: short(rest), expected }
}

/// Texts of compressors in a list, separated by commas that stand outside parentheses.
pub fn split_list(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0i32;
    let outside = move |c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth <= 0
    };
    list.split(outside).map(str::trim)
}

/// Splits at `+` outside parentheses: exponents as in 1e+3 stand inside them.
fn terms(text: &str) -> Result<Vec<Term<'_>>, SpecError> {
    let mut terms = Vec::new();
    let mut rest = text.trim();
    loop {
        let end = rest.find(['(', '+']).unwrap_or(rest.len());
        let name = rest[..end].trim();
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-') {
            return Err(syntax(text, rest, "a name"));
        }
        rest = &rest[end..];
        let mut term = Term { name, word: None, given: Vec::new() };
        if let Some(inside) = rest.strip_prefix('(') {
            let close = inside.find(')').ok_or_else(|| syntax(text, rest, "a closing parenthesis"))?;
            arguments(&inside[..close], &mut term).map_err(|(at, expected)| syntax(text, at, expected))?;
            rest = inside[close + 1..].trim_start();
        }
        terms.push(term);
        match rest.strip_prefix('+') {
            Some(next) => rest = next,
            None if rest.is_empty() => return Ok(terms),
            None => return Err(syntax(text, rest, "+ or the end")),
        }
    }
}

fn arguments<'a>(text: &'a str, term: &mut Term<'a>) -> Result<(), (&'a str, &'static str)> {
    if text.trim().is_empty() {
        return Ok(());
    }
    for (i, part) in text.split(',').enumerate() {
        match part.split_once('=') {
            Some((key, value)) if !key.trim().is_empty() && !value.trim().is_empty() => {
                term.given.push((key.trim(), value.trim()));
            }
            None if i == 0 && !part.trim().is_empty() => term.word = Some(part.trim()),
            _ => return Err((part, "key=value")),
        }
    }
    Ok(())
}

impl FromStr for CompressorSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        read(text, None)
    }
}

/// Reads a compressor's text; where the share of kept values may be left open, `open` stands for a `k=*` and for a k that is missing.
pub(super) fn read(text: &str, open: Option<&str>) -> Result<CompressorSpec, SpecError> {
    if text.len() > MOST_BYTES {
        return Err(syntax(text, text, "at most 4096 bytes"));
    }
    if let Some((name, cr)) = text.split_once('@') {
        return Err(with_ratio_behind(text, name, cr));
    }
    if let Some(collective) = text.find('/') {
        return Err(syntax(text, &text[collective..], "a compressor alone, without a collective"));
    }
    let terms = terms(text)?;
    let (codec, parts) = terms.split_first().ok_or_else(|| syntax(text, text, "a compressor"))?;
    let compressor = find(codec.name)?;
    let mut given = with_first(codec, compressor.params)?;
    let kept = compressor.params.iter().find(|param| param.is_kept_share());
    if let Some((share, kept)) = open.zip(kept) {
        match given.iter_mut().find(|(key, _)| *key == kept.name) {
            Some((_, value)) if *value == ANY => *value = share,
            Some(_) => {}
            None => given.push((kept.name, share)),
        }
    }
    let mut spec = CompressorSpec::of(compressor, Values::read(compressor.name, compressor.params, &given)?);
    let mut seen: Vec<&str> = Vec::new();
    for part in parts {
        let slot = spec.apply(part)?;
        if seen.contains(&slot) {
            return Err(SpecError::Twice { of: compressor.name.into(), key: slot.into() });
        }
        seen.push(slot);
    }
    spec.checked()
}

/// `COMPRESSOR@CR`, the form before this one, which had error feedback without saying so.
fn with_ratio_behind(text: &str, name: &str, behind: &str) -> SpecError {
    let short = |s: &str| s.chars().take(80).collect::<String>();
    let behind = behind.split('/').next().unwrap_or_default();
    let (cr, parts) = behind.split_once('+').unwrap_or((behind, ""));
    let (name, before) = name.split_once('+').unwrap_or((name, ""));
    let now = match find(name.split('(').next().unwrap_or_default().trim()) {
        Ok(compressor) if compressor.params.iter().any(Param::is_kept_share) => {
            let is_share = cr.trim().parse().is_ok_and(|share: f64| share > 0.0 && share < 1.0);
            let k = if is_share { cr.trim() } else { "..." };
            let written = [before, parts].into_iter().filter(|parts| !parts.is_empty());
            let has_memory = |parts: &str| {
                parts.split('+').any(|part| part.split('(').next().is_some_and(|name| name.trim() == "ef"))
            };
            let memory = if written.clone().any(has_memory) { None } else { Some("ef(vanilla)") };
            let parts: String = memory.into_iter().chain(written).map(|part| format!("+{part}")).collect();
            format!("{}(k={}){}", compressor.name, short(k), short(&parts))
        }
        Ok(compressor) => format!("{} with its parameters in parentheses", compressor.name),
        Err(error) => return error,
    };
    SpecError::RatioBehind { text: short(text), now }
}

/// What is given, a bare word as the first parameter where that has no default.
fn with_first<'a>(term: &Term<'a>, params: &[Param]) -> Result<Vec<(&'a str, &'a str)>, SpecError> {
    let first = params.first().filter(|param| param.default.is_none());
    let Some((word, first)) = term.word.zip(first) else {
        no_word(term, params)?;
        return Ok(term.given.clone());
    };
    Ok([(first.name, word)].into_iter().chain(term.given.iter().copied()).collect())
}

/// A bare word where only keys are understood.
fn no_word(term: &Term<'_>, params: &[Param]) -> Result<(), SpecError> {
    match term.word {
        Some(word) => Err(SpecError::unknown_key(term.name, word, params)),
        None => Ok(()),
    }
}

/// A part that is one word out of a few.
pub(super) struct WordPart {
    pub(super) name: &'static str,
    words: &'static [&'static str],
    pub(super) get: fn(&CompressorSpec) -> &'static str,
    set: fn(&mut CompressorSpec, usize),
}

macro_rules! word_part {
    ($name:literal, $field:ident: $words:ident) => {
        WordPart {
            name: $name,
            words: $words::WORDS,
            get: |spec| spec.$field.as_str(),
            set: |spec, place| spec.$field = $words::ALL[place],
        }
    };
}

/// In the order of the canonical text.
pub(super) const WORD_PARTS: &[WordPart] = &[
    word_part!("scope", scope: Scope),
    word_part!("values", value_type: ValueType),
    word_part!("checksum", checksum: Checksum),
    word_part!("nonfinite", non_finite: NonFinite),
];

impl CompressorSpec {
    /// Adds a part; answers which.
    fn apply(&mut self, part: &Term<'_>) -> Result<&'static str, SpecError> {
        if part.name == "ef" {
            return self.apply_memory(part);
        }
        if let Some(words) = WORD_PARTS.iter().find(|p| p.name == part.name) {
            let (value, kind) = (part.word.unwrap_or_default(), Kind::Choice(words.words));
            let param = Param::required(words.name, kind, "");
            let place = kind.read(value).ok_or_else(|| SpecError::range("the strategy", &param, value))?;
            if let Some((key, _)) = part.given.first() {
                return Err(SpecError::unknown_key(words.name, key, &[]));
            }
            (words.set)(self, place as usize);
            return Ok(words.name);
        }
        if part.name == "seed" {
            return self.apply_seed(part);
        }
        let momentum = MOMENTA.iter().find(|m| m.name == part.name);
        let momentum = momentum.ok_or_else(|| SpecError::unknown("part", part.name, part_names()))?;
        let given = with_first(part, momentum.params)?;
        self.momentum = Some((momentum, Values::read(momentum.name, momentum.params, &given)?));
        Ok("momentum")
    }

    /// Refuses what no part alone shows: a checksum would not survive the sum, and what sends no values of the tensor has
    /// none to round.
    fn checked(self) -> Result<Self, SpecError> {
        if self.value_type != ValueType::F32 && !self.compressor.copies_values() {
            let names: Vec<_> = compressors::COPYING.iter().map(|info| info.name).collect();
            return Err(SpecError::Range {
                of: self.compressor.name.into(),
                key: "values".into(),
                value: self.value_type.as_str().into(),
                allowed: format!("f32; others are for what sends selected values: {}", names.join(", ")),
            });
        }
        match (self.travels(), self.checksum) {
            (Travels::Sums(_), Checksum::Crc32c) => Err(SpecError::Range {
                of: self.compressor.name.into(),
                key: "checksum".into(),
                value: "crc32c".into(),
                allowed: "none, its messages add up in flight".into(),
            }),
            _ => Ok(self),
        }
    }

    fn apply_seed(&mut self, part: &Term<'_>) -> Result<&'static str, SpecError> {
        let value = part.word.unwrap_or_default();
        let param = Param::required("seed", Kind::Whole(0, u64::MAX), "");
        self.seed = Some(value.parse().map_err(|_| SpecError::range("the strategy", &param, value))?);
        match part.given.first() {
            Some((key, _)) => Err(SpecError::unknown_key("seed", key, &[])),
            None => Ok("seed"),
        }
    }

    fn apply_memory(&mut self, part: &Term<'_>) -> Result<&'static str, SpecError> {
        let name = part.word.unwrap_or(USUAL_MEMORY);
        let memory = MEMORIES.iter().find(|m| m.name == name);
        let unknown = || SpecError::unknown("error feedback", name, MEMORIES.iter().map(|m| m.name));
        let memory = memory.ok_or_else(unknown)?;
        self.memory = Some((memory, Values::read(&format!("ef({name})"), memory.params, &part.given)?));
        Ok("ef")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        text.parse::<CompressorSpec>().unwrap_err().to_string()
    }

    #[test]
    fn a_ratio_behind_an_at_is_answered_by_what_to_write() {
        for (text, now) in [
            ("topk@0.01", "topk(k=0.01)+ef(vanilla)"),
            ("topk@0.01/allgather", "topk(k=0.01)+ef(vanilla)"),
            ("adaq@0.1", "adaptivethreshold(k=0.1)+ef(vanilla)"),
            ("topk@abc", ": topk(k=...)+ef(vanilla)"),
            ("topk@1.5", ": topk(k=...)+ef(vanilla)"),
            ("topk@0.01+ef(efsign)", ": topk(k=0.01)+ef(efsign)"),
            ("topk@0.01+nesterov(mu=0.9)/allgather", ": topk(k=0.01)+ef(vanilla)+nesterov(mu=0.9)"),
            ("topk+ef(dgc,mu=0.9)@0.01", ": topk(k=0.01)+ef(dgc,mu=0.9)"),
            ("qsgd@4", "qsgd with its parameters in parentheses"),
            ("topkk@4", "did you mean topk?"),
        ] {
            assert!(error(text).ends_with(now), "{text}: {}", error(text));
        }
    }

    #[test]
    fn texts_come_out_in_one_form() {
        for (text, canonical) in [
            ("topk(k=0.01)", "topk(k=0.01)"),
            (" topk( k = 1e-2 ) + ef( vanilla ) ", "topk(k=0.01)+ef(vanilla)"),
            ("topk(0.01)+ef", "topk(k=0.01)+ef(vanilla)"),
            (
                "topk(k=3)+nesterov(mu=0.9)+ef(vanilla,beta=1,gamma=0.5)",
                "topk(k=3)+ef(vanilla,gamma=0.5)+nesterov(mu=0.9)",
            ),
            ("onebit()", "onebit"),
            ("topk(0.01)+values(bf16)+ef(vanilla)", "topk(k=0.01)+ef(vanilla)+values(bf16)"),
            ("lwtopk(0.01)+values(int8)+scope(bucket)", "lwtopk(k=0.01)+scope(bucket)+values(int8)"),
            ("dgc(0.01)+values(f32)", "dgc(k=0.01)"),
            ("topk(0.01)+ef(vanilla)", "topk(k=0.01)+ef(vanilla)"),
            ("qsgd(4, norm=max)", "qsgd(s=4,norm=max)"),
            ("powersgd(2)+nesterov(0.9)", "powersgd(rank=2)+nesterov(mu=0.9)"),
            ("sketch", "sketchml"),
            ("adaq(0.01)", "adaptivethreshold(k=0.01)"),
            ("u8bit", "eightbit"),
            ("3lc(s=1.5)", "threelc(s=1.5)"),
            (
                "onebit(scaling=false)+seed(18446744073709551615)+checksum(crc32c)+nonfinite(skip)+scope(bucket)",
                "onebit+scope(bucket)+checksum(crc32c)+nonfinite(skip)+seed(18446744073709551615)",
            ),
            ("onebit(scaling=true)", "onebit(scaling=true)"),
        ] {
            let strategy: CompressorSpec = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(strategy.to_string(), canonical, "{text}");
            assert_eq!(canonical.parse::<CompressorSpec>().unwrap(), strategy);
        }
    }

    #[test]
    fn errors_name_key_value_and_range() {
        assert_eq!(
            error("topk"),
            "build topk without k: it must be given, a share above 0 and below 1, or a whole number of values from 1 to \
             2^32 - 1 in digits alone (1.0 would be either)"
        );
        for (text, parts) in [
            ("topk(k=0)", ["k of topk", "\"0\"", "above 0 and below 1"]),
            ("topk(k=1.5)", ["k of topk", "\"1.5\"", "whole number"]),
            ("topk(k=1.0)", ["k of topk", "\"1.0\"", "1.0 would be either"]),
            ("topk(k=1e0)", ["k of topk", "\"1e0\"", "digits alone"]),
            ("topk(k=0.99999999999999999)", ["k of topk", "\"0.99999999999999999\"", "below 1"]),
            ("topk(k=2.0)", ["k of topk", "\"2.0\"", "digits alone"]),
            ("sketched(k=3,columns=1.0)", ["columns of sketched", "\"1.0\"", "digits alone"]),
            ("topk(k=nan)", ["k of topk", "\"nan\"", "above 0"]),
            ("topk(k=inf)", ["k of topk", "\"inf\"", "above 0"]),
            ("topk(k=-1)", ["k of topk", "\"-1\"", "above 0"]),
            ("topk(kk=1)", ["\"kk\"", "topk", "it takes k; did you mean k?"]),
            ("qsgd(s=4,nrm=max)", ["\"nrm\"", "qsgd", "did you mean norm?"]),
            ("topk(k=1)+ef(vanilla,bta=1)", ["\"bta\"", "ef(vanilla)", "did you mean beta?"]),
            ("topk(k=1)+nestrov(mu=0.9)", ["\"nestrov\"", "part", "did you mean nesterov?"]),
            ("topk(k=1)+scope(bukcet)", ["scope", "\"bukcet\"", "did you mean bucket?"]),
            ("topk(k=1)+checksm(crc32c)", ["\"checksm\"", "part", "did you mean checksum?"]),
            ("topk(k=1)+checksum(crc32)", ["checksum", "\"crc32\"", "did you mean crc32c?"]),
            ("topk(k=1,k=2)", ["k", "topk", "twice"]),
            ("topk(0.1,k=0.1)", ["k", "topk", "twice"]),
            ("topk(1.0)", ["k of topk", "\"1.0\"", "1.0 would be either"]),
            ("onebit(0.1)", ["\"0.1\"", "onebit", "it takes scaling"]),
            ("sketchml(0.1)", ["\"0.1\"", "sketchml", "it takes buckets"]),
            ("topk(k=1)+ef(vanila)", ["\"vanila\"", "error feedback", "did you mean vanilla?"]),
            ("topk(k=1)+ef(vanilla,beta=0)", ["beta of ef(vanilla)", "\"0\"", "above 0"]),
            ("topk(k=1)+nesterov", ["nesterov", "mu", "below 1"]),
            ("topk(k=1)+nesterov(mu=1)", ["mu of nesterov", "\"1\"", "below 1"]),
            ("topk(k=1)+scope(layer)", ["scope", "\"layer\"", "bucket or tensor"]),
            ("topk(k=1)+ef(vanilla)+ef(vanilla)", ["ef", "topk", "twice"]),
            ("topk(k=1)+values(fp8)", ["values", "\"fp8\"", "f32 or bf16 or int8"]),
            ("qsgd(s=4)+values(bf16)", ["values of qsgd", "\"bf16\"", "topk, lwtopk"]),
            ("topk(k=1)+what", ["\"what\"", "part", "nesterov"]),
            ("topkk(k=1)", ["\"topkk\"", "compressor", "did you mean topk?"]),
            ("zebra(k=1)", ["\"zebra\"", "compressor", "compression/COMPRESSORS.md lists all of them"]),
            ("ef(vanilla)", ["compressor \"ef\"", "comes after a compressor", "topk(k=0.01)+ef(vanilla)"]),
            ("PowerSDG(2)", ["\"PowerSDG\"", "compressor", "did you mean powersgd?"]),
            ("onebit(scaling=1)", ["scaling of onebit", "\"1\"", "true or false"]),
        ] {
            let error = error(text);
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }

    /// 1 in digits is one value, whatever the tensor's length; a share may come near to 1 but never is.
    #[test]
    fn one_is_one_value() {
        let k = |text: &str, n| text.parse::<CompressorSpec>().unwrap().values().kept(0, n);
        assert_eq!((k("topk(k=1)", 1000), k("topk(k=001)", 1000), k("topk(k=0.999)", 1000)), (1, 1, 999));
        assert_eq!((k("topk(k=1e-3)", 1000), k("topk(k=5000)", 1000), k("topk(k=0.0001)", 1000)), (1, 1000, 1));
        let above = |text: &str| text.parse::<CompressorSpec>().unwrap().k_above(1000);
        assert_eq!((above("topk(k=5000)"), above("topk(k=1000)"), above("topk(k=0.9)")), (Some(5000), None, None));
        assert_eq!(above("sketched(k=10,columns=2000)"), None);
    }

    #[test]
    fn what_is_not_of_the_form_is_refused() {
        for text in [
            "",
            "+",
            "topk(",
            "topk(k=1",
            "topk(k=1))",
            "topk(k=1)ef",
            "topk(k=1)+",
            "topk(,)",
            "topk(k=)",
            "topk(=1)",
            "t opk(k=1)",
        ] {
            assert!(matches!(text.parse::<CompressorSpec>(), Err(SpecError::Syntax { .. })), "{text:?}");
        }
    }
}
