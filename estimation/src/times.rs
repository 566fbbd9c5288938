//! How long compressors take on a kind of machine: what is assumed before a job has measured it.
//!
//! A table is what `flexcomm bench compressors --json` prints. Of each compressor the rows of its largest gradient count; from
//! those of two ratios or more follows what a value costs and what a kept value costs on top.

use flexcomm_domain::spec::{CompressorSpec, Travels};
use flexcomm_domain::{CodecCost, CompressionRatio, Family, Selector};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// More values than this are assumed to take as long as this many: some weeks.
const MOST_VALUES: f64 = 1e14;

/// What ships: one core of a server CPU.
static SHIPPED: LazyLock<Times> = LazyLock::new(|| {
    let read = Times::over(Times { costs: BTreeMap::new(), speed: 1.0 }, include_str!("times.json"));
    read.expect("a test reads the table that ships")
});

/// Seconds that exact top-k with error feedback takes to compress so many values at a ratio and to decompress one message, by the
/// table that ships.
pub(crate) fn top_k_s(values: u64, ratio: f64) -> f64 {
    let n = (values as f64).min(MOST_VALUES);
    SHIPPED.costs_like("topk").iter().flatten().map(|cost| cost.of(n, ratio)).sum()
}

/// A line of the table; what else `flexcomm bench compressors` says is not looked at.
#[derive(Debug, Clone, Deserialize)]
struct Row {
    method: String,
    n: u64,
    compress_s: Option<f64>,
    decompress_s: Option<f64>,
}

/// Through the points (share of kept values, seconds per value) of the least and the largest ratio; of one ratio alone with the
/// relation of `listed`.
fn through(points: &[(f64, f64)], listed: Option<CodecCost>) -> Option<CodecCost> {
    let (low, high) = (points.first()?, points.last()?);
    if high.0 > low.0 {
        return Some(CodecCost::through(*low, *high));
    }
    let listed = listed.unwrap_or(CodecCost { value_s: 1.0, kept_s: 0.0 });
    let times = low.1 / listed.of(1.0, low.0);
    let times = if times.is_finite() { times } else { 0.0 };
    Some(CodecCost { value_s: times * listed.value_s, kept_s: times * listed.kept_s })
}

/// What compressing takes, by compressor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// To compress, and to decompress one message.
    costs: BTreeMap<Family, [CodecCost; 2]>,
    /// Times of this job's machines over the table's.
    speed: f64,
}

/// A table that tells no times. Completes "failed to read FILE: ...".
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TimesError {
    /// Not the rows of `flexcomm bench compressors --json`.
    #[error("it is not what `flexcomm bench compressors --json` prints: {0}")]
    Form(String),
    /// A row of no compressor.
    #[error("row {row}: failed to {why}")]
    Method {
        /// Which, from 1.
        row: usize,
        /// What is wrong with its name.
        why: String,
    },
    /// A number outside its range.
    #[error("row {row}: {what} of {method} is {value}, allowed is {allowed}")]
    Range {
        /// Which, from 1.
        row: usize,
        /// Of which method.
        method: String,
        /// Which number.
        what: &'static str,
        /// As given.
        value: f64,
        /// The allowed range.
        allowed: &'static str,
    },
    /// Nothing was measured.
    #[error("no row has times")]
    Empty,
}

impl Default for Times {
    /// The table that ships.
    fn default() -> Self {
        SHIPPED.clone()
    }
}

impl Times {
    /// Reads what `flexcomm bench compressors --json` printed. Rows without numbers are left out; compressors that it lacks take what
    /// the table that ships says, times the median of what its own take over what they take there.
    pub fn read(json: &str) -> Result<Self, TimesError> {
        Self::over(SHIPPED.clone(), json)
    }

    fn over(mut table: Self, json: &str) -> Result<Self, TimesError> {
        let rows: Vec<Row> = serde_json::from_str(json).map_err(|e| TimesError::Form(e.to_string()))?;
        let mut measured: BTreeMap<Family, Vec<Measured>> = BTreeMap::new();
        for (i, row) in rows.iter().enumerate() {
            let Some(seconds) = row.compress_s.zip(row.decompress_s) else { continue };
            let spec: CompressorSpec =
                row.method.parse().map_err(|e| TimesError::Method { row: i + 1, why: format!("{e}") })?;
            let per_value = check(i + 1, row, [seconds.0, seconds.1])?;
            let ratio = spec.ratio().map_or(1.0, |ratio| ratio.get());
            measured.entry(spec.into()).or_default().push(Measured { values: row.n, ratio, per_value });
        }
        if measured.is_empty() {
            return Err(TimesError::Empty);
        }
        let of =
            |(family, rows): (&Family, &Vec<_>)| Some((*family, of_largest(rows, table.costs.get(family).copied())?));
        let own: BTreeMap<Family, [CodecCost; 2]> = measured.iter().filter_map(of).collect();
        let times = table.slower(&own);
        for cost in table.costs.values_mut().flatten() {
            *cost = CodecCost { value_s: times * cost.value_s, kept_s: times * cost.kept_s };
        }
        Ok(table.with(own))
    }

    /// The median (of an even number the upper one) of what compressing takes by `own` over what it takes by this, of those that
    /// both have; 1 of none. What is said to take no time tells nothing of the others.
    fn slower(&self, own: &BTreeMap<Family, [CodecCost; 2]>) -> f64 {
        let takes = |costs: &[CodecCost; 2]| costs.iter().map(|cost| cost.of(1.0, 0.01)).sum::<f64>();
        let both = own.iter().filter_map(|(family, costs)| Some(takes(costs) / takes(self.costs.get(family)?)));
        let mut ratios: Vec<f64> = both.filter(|ratio| ratio.is_finite() && *ratio > 0.0).collect();
        ratios.sort_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(1.0)
    }

    /// The same, but for compressors of which these are known: to compress, and to decompress one message.
    pub fn with(mut self, known: impl IntoIterator<Item = (Family, [CodecCost; 2])>) -> Self {
        self.costs.extend(known);
        self
    }

    /// The same on machines that take `speed` times as long, within a tenth and ten times; what is no number counts as 1.
    pub fn at_speed(self, speed: f64) -> Self {
        let speed = if speed.is_nan() { 1.0 } else { speed };
        Self { speed: speed.clamp(0.1, 10.0), ..self }
    }

    /// Whether the table has a compressor, with these or other parameters.
    pub fn knows(&self, family: Family) -> bool {
        self.costs.contains_key(&family) || self.costs_like(family.name()).is_some()
    }

    /// Parameters change a compressor's time far less than the choice of one does: with others than the table's it takes as long.
    fn costs_like(&self, name: &str) -> Option<[CodecCost; 2]> {
        self.costs.iter().find(|(other, _)| other.name() == name).map(|(_, costs)| *costs)
    }

    /// What a table that was stored lacks takes as long as by the one that ships.
    fn costs_of(&self, family: Family) -> [CodecCost; 2] {
        let own = self.costs.get(&family).copied().or_else(|| self.costs_like(family.name()));
        own.or_else(|| SHIPPED.costs_like(family.name())).expect("the_table_that_ships_has_every_compressor")
    }

    /// Seconds that one of `ranks` takes in a step to compress a gradient of so many values and to decompress what arrives:
    /// every rank's message where they are gathered, one sum where they add up.
    pub fn t_comp(&self, selector: Selector, ratio: CompressionRatio, (values, ranks): (u64, usize)) -> f64 {
        // Also with a memory, which has nothing to keep.
        if selector.family.name() == CompressorSpec::NONE.compressor().name {
            return 0.0;
        }
        let [compress, decompress] = self.costs_of(selector.family);
        let gathered = selector.family.any().travels() == Travels::Gathers && selector.selection.is_none();
        let messages = if gathered { ranks as f64 } else { 1.0 };
        let (n, ratio) = ((values as f64).min(MOST_VALUES), ratio.get());
        self.speed * (compress.of(n, ratio) + messages * decompress.of(n, ratio))
    }
}

/// Seconds per value.
fn check(row: usize, given: &Row, seconds: [f64; 2]) -> Result<[f64; 2], TimesError> {
    let refuse =
        |what, value, allowed| Err(TimesError::Range { row, method: given.method.clone(), what, value, allowed });
    if given.n == 0 {
        return refuse("n", 0.0, "1 or more");
    }
    let per_value = seconds.map(|seconds| seconds / given.n as f64);
    match per_value.iter().position(|value| !(0.0..=CodecCost::MOST_S).contains(value)) {
        Some(0) => refuse("compress_s", seconds[0], "0 to 0.001 s per value"),
        Some(_) => refuse("decompress_s", seconds[1], "0 to 0.001 s per value"),
        None => Ok(per_value),
    }
}

/// What a row says.
struct Measured {
    values: u64,
    /// The share of values that is kept.
    ratio: f64,
    /// Seconds per value to compress, and to decompress.
    per_value: [f64; 2],
}

/// Of the rows of the most values: of several of one ratio (other values) the median.
fn of_largest(rows: &[Measured], listed: Option<[CodecCost; 2]>) -> Option<[CodecCost; 2]> {
    let most = rows.iter().map(|row| row.values).max()?;
    let of = |which: usize| {
        let mut points: Vec<(f64, f64)> =
            rows.iter().filter(|row| row.values == most).map(|row| (row.ratio, row.per_value[which])).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let medians: Vec<(f64, f64)> = points.chunk_by(|a, b| a.0 == b.0).map(|same| same[same.len() / 2]).collect();
        through(&medians, listed.map(|listed| listed[which]))
    };
    Some([of(0)?, of(1)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::spec::compressors::COMPRESSORS;
    use flexcomm_domain::{Strategy, default_compressors};

    fn t_comp(times: &Times, text: &str, values: u64, ranks: usize) -> f64 {
        let strategy: Strategy = text.parse().unwrap();
        times.t_comp(strategy.selector(), strategy.cr(), (values, ranks))
    }

    const TABLE: &str = r#"[
        {"method":"topk(k=0.1)+ef(vanilla)","n":1000,"compress_s":3e-6,"decompress_s":1e-6,"gain":1.0},
        {"method":"topk(k=0.1)+ef(vanilla)","n":1000000,"compress_s":3e-3,"decompress_s":1e-3,"skipped":null},
        {"method":"topk(k=0.01)+ef(vanilla)","n":1000000,"compress_s":1.2e-3,"decompress_s":1e-4},
        {"method":"fp16","n":1000000,"compress_s":5e-4,"decompress_s":3e-4},
        {"method":"variance","n":1000000,"compress_s":null,"decompress_s":null,"skipped":"no row after 60 s (--limit)"}
    ]"#;

    #[test]
    fn times_follow_values_ratio_and_messages() {
        let times = Times::read(TABLE).unwrap();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9 * b, "{a} is not {b}");
        near(t_comp(&times, "topk@0.1/allgather", 1_000_000, 4), 3e-3 + 4.0 * 1e-3);
        near(t_comp(&times, "topk@0.01/allgather", 2_000_000, 4), 2.0 * (1.2e-3 + 4.0 * 1e-4));
        // 1 ms per million values and 20 ms per million kept ones; 1 of its messages is no lighter than the line through 0.
        near(t_comp(&times, "topk@0.06/art-ring:star", 1_000_000, 8), 2.2e-3 + 6e-4);
        near(t_comp(&times, "fp16/dense-ring", 1_000_000, 8), 8e-4);
        near(t_comp(&times.clone().at_speed(2.5), "fp16/dense-ring", 1_000_000, 8), 2e-3);
        // As in the table that ships, scaled by what both have (of two the slower), and in its relations where there is one ratio.
        let shipped = Times::default();
        let of = |times: &Times, text: &str| t_comp(times, text, 1_000_000, 8);
        let fp16_alone = r#"[{"method":"fp16","n":1000,"compress_s":1,"decompress_s":0}]"#;
        let (fp16_alone, fp16) = (Times::read(fp16_alone).unwrap(), of(&shipped, "fp16/dense-ring"));
        for text in ["mstopk@0.1/allgather", "dgc(k=0.01)+ef(vanilla)/allgather", "onebit+ef(vanilla)/allgather"] {
            near(of(&fp16_alone, text) / of(&shipped, text), 1e3 / fp16);
        }
        let one = r#"[{"method":"mstopk(k=0.1)+ef(vanilla)","n":10,"compress_s":1e-6,"decompress_s":0}]"#;
        let one = Times::read(one).unwrap();
        near(of(&one, "mstopk@0.1/allgather"), 0.1);
        assert!(of(&one, "mstopk@0.001/allgather") < 0.06);
        near(of(&times, "qsgd(s=4)+ef(vanilla)/allgather"), of(&times, "qsgd(s=7,norm=max)+ef(vanilla)/allgather"));
        assert_ne!(of(&times, "qsgd(s=4)+ef(vanilla)/allgather"), of(&times, "terngrad+ef(vanilla)/allgather"));
        assert_eq!(t_comp(&times, "none/dense-ring", 1_000_000, 8), 0.0);
        assert_eq!(times.clone().at_speed(f64::NAN), times);
        assert!(times.knows("variance".parse().unwrap()) && times.knows("fp16".parse().unwrap()));
        // Of several distributions the median.
        let rows: Vec<String> = [1.0, 9.0, 2.0]
            .map(|s| format!("{{\"method\":\"fp16\",\"n\":1000000,\"compress_s\":{s},\"decompress_s\":0}}"))
            .to_vec();
        near(of(&Times::read(&format!("[{}]", rows.join(","))).unwrap(), "fp16/dense-ring"), 2.0);
    }

    #[test]
    fn what_a_job_has_measured_counts_before_the_table() {
        let costs = [CodecCost { value_s: 1e-11, kept_s: 4e-11 }, CodecCost { value_s: 0.0, kept_s: 1e-10 }];
        let (table, topk) = (Times::read(TABLE).unwrap(), "topk".parse().unwrap());
        let times = table.clone().with([(topk, costs)]);
        let of = |times: &Times, text: &str| t_comp(times, text, 1_000_000, 4);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9 * b, "{a} is not {b}");
        near(of(&times, "topk@0.1/allgather"), 1.4e-5 + 4.0 * 1e-5);
        near(of(&times, "topk@0.01/art-ring:star"), 1.04e-5 + 1e-6);
        near(of(&times.clone().at_speed(2.0), "topk@0.1/allgather"), 2.0 * 5.4e-5);
        for text in ["fp16/dense-ring", "mstopk@0.1/allgather", "powersgd(rank=2)+ef(vanilla)/dense-ring"] {
            assert_eq!(of(&times, text), of(&table, text), "{text}");
        }
    }

    #[test]
    fn tables_that_tell_nothing_are_refused() {
        let error = |json: &str| Times::read(json).unwrap_err().to_string();
        assert!(error("{}").contains("bench compressors --json"));
        assert_eq!(error("[]"), "no row has times");
        let row = |method: &str, n: u64, seconds: f64| {
            format!("[{{\"method\":{method:?},\"n\":{n},\"compress_s\":{seconds},\"decompress_s\":0}}]")
        };
        assert!(
            error(&row("topkk", 9, 1e-9)).contains("row 1: failed to find compressor \"topkk\": did you mean topk?")
        );
        assert!(
            error(&row("fp16", 9, -1.0)).contains("row 1: compress_s of fp16 is -1, allowed is 0 to 0.001 s per value")
        );
        assert!(error(&row("fp16", 9, 1.0)).contains("allowed is 0 to 0.001 s per value"));
        assert!(error(&row("fp16", 0, 0.0)).contains("n of fp16 is 0"));
    }

    #[test]
    fn the_table_that_ships_has_every_compressor() {
        let times = Times::default();
        for family in default_compressors() {
            assert!(times.costs.contains_key(&family), "{family}");
        }
        let rows: Vec<Row> = serde_json::from_str(include_str!("times.json")).unwrap();
        let measured = |row: &&Row| row.compress_s.is_some() && row.decompress_s.is_some();
        let specs: Vec<CompressorSpec> = rows.iter().filter(measured).map(|row| row.method.parse().unwrap()).collect();
        for info in COMPRESSORS.iter().filter(|info| info.name != "none") {
            let own: Vec<_> = specs.iter().filter(|spec| spec.compressor() == *info).collect();
            let ratios: Vec<f64> = own.iter().filter_map(|spec| Some(spec.ratio()?.get())).collect();
            let keeps_share =
                format!("{}(k=0.1)", info.name).parse::<CompressorSpec>().is_ok_and(|s| s.ratio().is_some());
            let complete = if keeps_share { ratios == [0.1, 0.001] } else { !own.is_empty() };
            let (name, k) = (info.name, if keeps_share { "k=0.1 and then k=0.001" } else { "its parameters" });
            assert!(
                complete,
                "estimation/src/times.json lacks {name}: flexcomm bench compressors --methods '{name}({k})' --n 2.5e7 \
                 --distributions normal --json prints its rows, see docs/adding.md, \"A compressor\""
            );
        }
        for values in [0, 1, u64::MAX] {
            assert!(t_comp(&times, "topk@0.1/allgather", values, 8).is_finite());
        }
        assert_eq!(t_comp(&times, "none+ef(vanilla)/dense-ring", 1_000_000, 8), 0.0);
    }

    #[test]
    fn a_row_of_no_time_makes_the_others_no_cheaper() {
        let free = r#"[{"method":"fp16","n":1000000,"compress_s":0,"decompress_s":0}]"#;
        let (times, shipped) = (Times::read(free).unwrap(), Times::default());
        let topk = "topk@0.1/allgather";
        assert_eq!(t_comp(&times, topk, 1_000_000, 8), t_comp(&shipped, topk, 1_000_000, 8));
    }

    #[test]
    fn a_table_goes_through_json() {
        let times = Times::default().at_speed(1.5);
        assert_eq!(serde_json::from_str::<Times>(&serde_json::to_string(&times).unwrap()).unwrap(), times);
    }
}
