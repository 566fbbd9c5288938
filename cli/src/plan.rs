//! `flexcomm plan`: what-if on the command line.

mod buckets;
mod files;
mod gains;
mod table;

use anyhow::{Context, Result};
use flexcomm_compression::{Layers, Sizes, codec::Shape};
use flexcomm_domain::{
    Bandwidth, CodecBytes, Collective, CompressionRatio, CompressorSpec, Family, Gain, Link, LinkMatrix, Seconds,
    Selection, Selector, Strategy, default_compressors, spec,
};
use flexcomm_estimation::{Times, known_gain, selected_by_one};
use flexcomm_optimizer::space::MAX_CRS;
use flexcomm_optimizer::{
    DEFAULT_CRS, Evaluated, GainSource, PolicyConfig, Problem, Space, policy::TimeToQuality, solve_among,
};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;

/// Most workers: the link matrix has N² entries.
const MAX_WORKERS: u32 = 4096;

/// Most values in a gradient: a hundred times the largest published models.
const MAX_PARAMS: f64 = 1e14;

/// Least ratio: a hundred thousand values of the largest gradient.
const LEAST_CR: f64 = 1e-9;

/// What would each collective and compression ratio cost on this network, and which should be used?
///
/// Times come from the alpha-beta model of flexcomm, over the schedules that its workers run; nothing is
/// measured. Dense training is always among the candidates: when compression does not pay, the answer says so.
#[derive(clap::Args)]
#[command(after_long_help = FORMATS)]
pub struct Args {
    /// Values in the gradient, for example 25.56M, 1.2B, 110k or 4096. With a file of buckets it may be left out.
    #[arg(long, value_name = "COUNT", allow_hyphen_values = true, value_parser = parse_count, required_unless_present = "buckets")]
    params: Option<u64>,

    /// Workers, 1 to 4096. With --links it may be left out.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_WORKERS)), required_unless_present = "links")]
    workers: Option<u32>,

    /// Workers on each node, in order: they share its NIC, and their own links have 20 us and 20 Gbit/s, or as much as those between nodes where
    /// that is faster.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_WORKERS)), default_value_t = 1, conflicts_with = "links")]
    per_node: u32,

    /// One-way latency of every link between nodes (ns, us, ms, s), for example 1ms.
    #[arg(long, value_name = "TIME", allow_hyphen_values = true, value_parser = parse::<Seconds>, required_unless_present = "links", conflicts_with = "links")]
    latency: Option<Seconds>,

    /// Bandwidth of every link between nodes (kbit, mbit, gbit), for example 10gbit.
    #[arg(long, value_name = "RATE", allow_hyphen_values = true, value_parser = parse::<Bandwidth>, required_unless_present = "links", conflicts_with = "links")]
    bandwidth: Option<Bandwidth>,

    /// Links that differ from pair to pair, as an N x N file (see below) in place of --latency and --bandwidth.
    #[arg(long, value_name = "MATRIX.csv")]
    links: Option<PathBuf>,

    /// Compression ratios (kept share of values, 1e-9 to below 1), separated by commas, of what has no k of its own in --compressors.
    /// Dense is always added.
    #[arg(long, value_name = "LIST", allow_hyphen_values = true, value_delimiter = ',', value_parser = parse_cr, default_values_t = DEFAULT_CRS.map(Ratio))]
    crs: Vec<Ratio>,

    /// Measured gain, where each rank selects for itself, and compression time per ratio (see below). Without it a default profile is
    /// assumed.
    #[arg(long, value_name = "FILE")]
    gain: Option<PathBuf>,

    /// Times of compressors, as `flexcomm bench compressors --json` prints them on the kind of machine that will run. Without it
    /// those of one core of a server CPU.
    #[arg(long, value_name = "FILE")]
    times: Option<PathBuf>,

    /// Also look for a strategy for each bucket: of so many equal buckets (1 to 60), or of a file of them (see below).
    #[arg(long, value_name = "N|FILE.csv", allow_hyphen_values = true)]
    buckets: Option<String>,

    /// Seed of the search over buckets; the same seed gives the same plan.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "buckets")]
    seed: u64,

    /// Time of a forward and backward pass. Without it compression looks better than it is: it shortens communication
    /// alone, and what it loses costs whole steps.
    #[arg(long, value_name = "TIME", allow_hyphen_values = true, value_parser = parse::<Seconds>, default_value = "0s")]
    compute: Seconds,

    /// How well communication hides behind computing, 1 (not at all) to 10 (all but wholly). With --buckets it is reckoned instead.
    #[arg(long, value_name = "G", allow_hyphen_values = true, value_parser = parse_overlap, default_value_t = 1.0, conflicts_with = "buckets")]
    overlap: f64,

    /// How one point of the front is chosen: time-to-quality (least time for the progress of a dense step), knee or
    /// weights.
    #[arg(long, value_name = "NAME", default_value = "time-to-quality", value_parser = parse_policy)]
    policy: PolicyConfig,

    /// Least gain that time-to-quality accepts, 0 to 1 (of PowerSGD and GradZip of rank R, least gain^(0.42/R)); what keeps less is listed
    /// and not chosen. Default 0: no floor.
    #[arg(long, value_name = "GAIN", allow_hyphen_values = true, value_parser = parse_floor)]
    gain_floor: Option<f64>,

    /// What delay costs under error feedback, 0 to 1: by time-to-quality the progress of a dense step takes gain^-P steps. 1: what
    /// is not sent is lost. Default: by the law measured with the momentum 0.9.
    #[arg(long, value_name = "P", allow_hyphen_values = true, value_parser = parse_exponent)]
    exponent: Option<f64>,

    /// Steps of the training: by the measured law delay costs less the more there are, from 100 to 100,000. Default: 500, for which it was
    /// fitted.
    #[arg(long, value_name = "N", conflicts_with = "exponent", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    steps: Option<u64>,

    #[arg(long, visible_alias = "compressor", value_name = "LIST", value_parser = parse_compressors, help = compressors_help())]
    compressors: Option<Compressors>,

    /// Admit biased compressors without error feedback, as "topk(k=*)": what they leave out of a step is lost, and is priced so.
    #[arg(long)]
    biased_without_memory: bool,

    /// How art-ring and art-tree choose whose indices count: star (in turn), var (largest gradient), or both.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["star", "var"], value_parser = parse::<Selection>)]
    selection: Vec<Selection>,

    /// Print JSON: {"costs": [...], "front": [...], "choice": {...}, "assumed": [...]}, times in seconds; with
    /// --buckets also "solver" with what it found in "plans". "strategy" is the text that a job can be given (where buckets differ a plan's, whose
    /// "compressor" and "collective" are null), "t_quality_s" is the time for the progress
    /// of a dense step, "gain" the share of the energy that is sent (of an unbiased compressor without error feedback 1/(1 + ω)),
    /// "variance" what such a one adds to the mean, "break_even_gain" the gain above which time-to-quality would prefer the row to
    /// dense; null where there is none.
    #[arg(long)]
    json: bool,
}

const FORMATS: &str = "\
Files:
  --gain FILE: CSV with a header line `cr,gain` or `cr,gain,t_comp_s`, one ratio per line: kept
  share of values, gain in (0, 1], seconds to compress and decompress. Empty lines and lines
  that begin with # are skipped.
      cr,gain,t_comp_s
      0.1,0.85,0.012
      0.01,0.52,0.011
  Between the ratios, gain and time are interpolated in log(cr), gain so that it never falls as
  cr grows; below the smallest, gain is taken to fall in proportion to cr. Without t_comp_s
  times are as without the file.

  --links MATRIX.csv: N lines of N cells LATENCY/BANDWIDTH, no header; line i, cell j is the link
  from worker i to worker j. The diagonal is not used and may be - or empty.
      -,1ms/10gbit,2ms/1gbit
      1ms/10gbit,-,2ms/1gbit
      2ms/1gbit,2ms/1gbit,-

  --buckets FILE.csv: CSV with a header line `bucket,params` or `bucket,params,energy`, one bucket
  per line in the order in which backward has them ready (the last layer's first): its name, its
  values, its share of the gradient's energy in any unit (default: its values).
      bucket,params,energy
      fc,2049000,0.4
      conv1,9408,3.1
  A bucket's exchange starts when it is ready and the one before has ended, so that early ones hide
  behind backward. NSGA-II searches as a controller does, among the ratios of --crs.

Default profile, assumed without --gain:
  gain(c) = c^0.6; compressing takes what --times says.

  --times FILE: the JSON of
      flexcomm bench compressors --json --methods 'topk(k=0.1)+ef(vanilla),topk(k=0.001)+ef(vanilla),fp16' >FILE
  The rows of the most values count; two ratios of a compressor tell what a kept value costs on top.

Examples:
  flexcomm plan --params 25.56M --workers 8 --latency 1ms --bandwidth 10gbit --compute 50ms
  flexcomm plan --params 86.57M --workers 16 --per-node 8 --latency 50us --bandwidth 25gbit --compute 80ms
  flexcomm plan --params 86.57M --links MATRIX.csv --gain FILE --compute 80ms --json
  flexcomm plan --params 86.57M --buckets 20 --workers 8 --latency 1ms --bandwidth 1gbit --compute 80ms";

/// A ratio below 1 as the command line has it.
#[derive(Debug, Clone, Copy)]
struct Ratio(f64);

impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

fn parse<T: std::str::FromStr<Err = flexcomm_domain::Invalid>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|e: flexcomm_domain::Invalid| e.to_string())
}

fn parse_count(text: &str) -> Result<u64, String> {
    let help = || format!("{text:?} is not a count: a number, with k, M or B behind it if you like (25.56M)");
    let (number, scale) = match text.trim().char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text.trim()[..at], 1e3),
        Some((at, 'm' | 'M')) => (&text.trim()[..at], 1e6),
        Some((at, 'b' | 'B' | 'g' | 'G')) => (&text.trim()[..at], 1e9),
        _ => (text.trim(), 1.0),
    };
    let count = number.trim().replace('_', "").parse::<f64>().map_err(|_| help())? * scale;
    if count.is_nan() {
        return Err(help());
    }
    if (1.0..=MAX_PARAMS).contains(&count.round()) {
        return Ok(count.round() as u64);
    }
    // What stands before k, M or B is not yet the count.
    let is = if scale == 1.0 { String::new() } else { format!(" is {count:e}") };
    Err(format!("{}{is} values, allowed are 1 to {MAX_PARAMS:e}", text.trim()))
}

fn parse_cr(text: &str) -> Result<Ratio, String> {
    let value: f64 = text.trim().parse().map_err(|_| format!("{text:?} is not a number"))?;
    let cr = CompressionRatio::new(value).map_err(|e| e.to_string())?;
    at_least(cr)?;
    if cr.is_dense() { Err("1 is dense, which is always a candidate: leave it out".into()) } else { Ok(Ratio(value)) }
}

fn at_least(cr: CompressionRatio) -> Result<(), String> {
    match cr.get() {
        value if value < LEAST_CR => Err(format!("compression ratio is {value:e}, allowed is {LEAST_CR:e} to below 1")),
        _ => Ok(()),
    }
}

fn within(text: &str, what: &str, low: f64, high: f64) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(v) if (low..=high).contains(&v) => Ok(v),
        _ => Err(format!("{what} {text:?} is not a number from {low} to {high}")),
    }
}

fn parse_overlap(text: &str) -> Result<f64, String> {
    within(text, "overlap", 1.0, 10.0)
}

fn parse_exponent(text: &str) -> Result<f64, String> {
    within(text, "exponent", 0.0, 1.0)
}

fn parse_floor(text: &str) -> Result<f64, String> {
    within(text, "gain floor", 0.0, 1.0)
}

fn parse_policy(text: &str) -> Result<PolicyConfig, String> {
    PolicyConfig::by_name(text).map_err(|e| e.to_string())
}

/// A compressor that competes.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    family: Family,
    /// The only ratio that it competes at, where its text says one; else those of --crs.
    ratio: Option<CompressionRatio>,
}

impl From<Family> for Candidate {
    fn from(family: Family) -> Self {
        Self { family, ratio: None }
    }
}

impl std::fmt::Display for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.ratio.and_then(|ratio| self.family.at(ratio).ok()) {
            Some(spec) => spec.fmt(f),
            None => self.family.fmt(f),
        }
    }
}

/// What --compressors lists.
#[derive(Debug, Clone)]
struct Compressors(Vec<Candidate>);

fn compressors_help() -> String {
    let default = default_compressors().iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    format!(
        "Compressors, separated by commas. A name alone (topk, powersgd, u8bit) is what competes by default under it, or else what \
         trainers offer of it: unbiased compressors (terngrad) and bare signs (signsgd) as they are, others with error feedback; \
         a text (\"qsgd(s=7)+ef(vanilla)\") is what it says. What keeps a share of the values \
         does so at each of --crs, but where its text has a k of its own: topk(k=0.01)+ef(vanilla) is at 0.01 alone, \
         topk(k=*)+ef(vanilla) at all. Without it all that compete by default: '{default}'"
    )
}

/// Names and texts.
fn parse_compressors(text: &str) -> Result<Compressors, String> {
    let mut all = Vec::new();
    for part in spec::split_list(text) {
        if let Ok(spec) = part.parse::<CompressorSpec>()
            && let Some(ratio) = spec.ratio()
        {
            at_least(ratio)?;
            all.push(Candidate { family: spec.into(), ratio: Some(ratio) });
            continue;
        }
        let families = Family::named(part).map_err(|e| format!("failed to {e}"))?;
        if let Some(family) = families.iter().find(|family| family.name() == Family::NONE.name() && !family.is_none()) {
            return Err(format!(
                "{family} compresses nothing, so that nothing comes after it: write none, or leave it out, since dense is always a \
                 candidate"
            ));
        }
        // Dense is in every space.
        all.extend(families.into_iter().filter(|family| !family.is_none()).map(Candidate::from));
    }
    Ok(Compressors(all))
}

/// The compressors that compete.
fn candidates(args: &Args) -> Result<Vec<Candidate>> {
    let default = || default_compressors().into_iter().map(Candidate::from).collect();
    let candidates = args.compressors.clone().map_or_else(default, |given| given.0);
    let refused = |one: &&Candidate| one.family.any().is_biased_without_memory() && !args.biased_without_memory;
    if let Some(one) = candidates.iter().find(refused) {
        bad_argument!(
            "--compressors names {one}, which is biased: without error feedback what it leaves out is lost. Write \
             {one}+ef(vanilla), or allow it by --biased-without-memory (planner.biased_without_memory = true for a controller)"
        );
    }
    Ok(candidates)
}

/// Rows and columns of the matrices that a gradient is taken to be made of: 2 MiB of values, between the layers of a
/// convolutional network and those of a transformer. Matters to low-rank compressors alone.
const MATRIX: usize = 512;

/// `1 worker`, `8 workers`.
fn workers(count: usize) -> String {
    format!("{count} worker{}", if count == 1 { "" } else { "s" })
}

/// What a compressor sends of so many values, by its codec on matrices of [`MATRIX`] rows and columns.
fn bytes_of(family: Family, values: u64) -> Result<CodecBytes> {
    let codec = |matrices: usize| -> Result<CodecBytes> {
        let layers = Layers::matrices(&vec![Shape { rows: MATRIX, cols: MATRIX }; matrices])?;
        Ok(Sizes::codec(family, &layers))
    };
    let (one, two) = (codec(1)?, codec(2)?);
    // What each matrix more adds to the fixed part.
    let each = two.header_bytes as f64 - one.header_bytes as f64;
    let more = (values as f64 / (MATRIX * MATRIX) as f64 - 1.0) * each;
    Ok(CodecBytes { header_bytes: (one.header_bytes as f64 + more).max(0.0) as u64, ..one })
}

/// Runs `flexcomm plan`.
pub fn run(args: Args) -> Result<()> {
    let plan = Plan::make(&args)?;
    let text = if args.json { serde_json::to_string_pretty(&plan.json())? + "\n" } else { table::render(&plan) };
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader has seen enough (`flexcomm plan | head`).
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("failed to print the plan"),
    }
}

/// A solved what-if and what had to be assumed.
struct Plan {
    problem: Problem,
    solved: Solved,
    policy: &'static str,
    /// Whether it is time-to-quality: break-even gains are of no other.
    by_quality: bool,
    network: String,
    assumed: Vec<String>,
    /// Whether gains were given, of what keeps a share of the values.
    gain_given: bool,
}

/// What came of a problem.
struct Solved {
    /// Every strategy; with buckets, in all of them.
    costs: Vec<Row>,
    /// Positions in `costs` of the front and of the choice, which is absent where strategies differ from bucket to bucket.
    marked: (Vec<usize>, Option<usize>),
    front: Vec<Row>,
    choice: Row,
    why: String,
    buckets: Option<buckets::Searched>,
}

impl Plan {
    fn make(args: &Args) -> Result<Self> {
        let (links, network) = network(args)?;
        let buckets = args.buckets.as_deref().map(|text| buckets::read(text, args.params)).transpose()?;
        let Some(values) = buckets.as_ref().map(buckets::Buckets::values).or(args.params) else {
            bad_argument!("--params is needed, or --buckets with a file");
        };
        let mut problem = Problem { compute: args.compute, overlap: args.overlap, ..Problem::new(values, links) };
        let mut assumed = Vec::new();
        let (config, spaces) = (policy(args)?, spaces(args, &candidates(args)?, problem.links.ranks())?);
        let compressors: Vec<Family> = spaces.iter().flat_map(|space| &space.compressors).copied().collect();
        let noisy = compressors.iter().filter(|family| family.any().is_unbiased_without_memory());
        assumed.extend(noisy.map(|family| {
            format!("{family} adds the variance that it has on normally distributed values, averaged over the workers")
        }));
        for family in &compressors {
            problem.codecs.insert(*family, bytes_of(*family, values)?);
        }
        if let Some(path) = &args.times {
            problem.times = files::load(path, Times::read)?;
        }
        let gains = gains::Gains::read(args, &mut assumed)?;
        let selects = |family: &&Family| family.has_ratio() && !family.any().is_unbiased_without_memory();
        for family in compressors.iter().filter(selects) {
            // Without a file of gains the optimizer has its own, and knows times by collective.
            if args.gain.is_some() {
                let by_one = args.selection.iter().map(|selection| Some(*selection));
                for selection in std::iter::once(None).chain(by_one) {
                    let selector = Selector { family: *family, selection };
                    problem.profiles.insert(selector, gains.profile(selector, &problem)?);
                }
            }
        }
        assumed.extend(about_curve(args, &problem, &spaces));
        assumed.extend(Self::assumptions(args, &problem, &gains, &compressors)?);
        let mut solved = Solved::one(&problem, &spaces, &config)?;
        if let Some(buckets) = &buckets {
            let whole = solved.costs.into_iter().map(|row| row.of).collect();
            solved = buckets::solve(&problem, buckets, (args, whole), &config)?;
        }
        if problem.compute == Seconds::ZERO {
            let from = match &config {
                PolicyConfig::TimeToQuality(p) if buckets.is_none() => Some(solved.dense_from(p, problem.overlap)),
                // What backward hides hangs on it, too.
                _ => None,
            };
            assumed.push(without_compute(from)?);
        }
        assumed.extend(solved.buckets.iter().flat_map(buckets::Searched::assumed));
        let (policy, gain_given) = (config.policy().name(), args.gain.is_some());
        let by_quality = matches!(config, PolicyConfig::TimeToQuality(_));
        let mut plan = Self { problem, solved, policy, by_quality, network, assumed, gain_given };
        plan.compare_with_dense(&config.time_to_quality());
        Ok(plan)
    }

    /// What is assumed where nothing measured was given.
    fn assumptions(
        args: &Args,
        problem: &Problem,
        gains: &gains::Gains,
        compressors: &[Family],
    ) -> Result<Vec<String>> {
        let mut assumed = Vec::new();
        if args.times.is_none()
            && !compressors.is_empty()
            && !(gains.has_times() && compressors.iter().all(Family::has_ratio))
        {
            let why = "compressing takes what it took on one core of a server CPU: give --times for measured ones";
            assumed.push(why.into());
        }
        if compressors.iter().any(|family| !family.has_ratio() && known_gain(*family).is_none()) {
            assumed.push(
                "what keeps no share of the values keeps what its definition or its bits say of values as a normal distribution \
                 spreads them, or as PowerSGD as much as top-k of as many bytes, on matrices of 512 x 512".into(),
            );
        }
        let bounded = compressors.iter().filter(|family| family.any().compressor().size_is_bound);
        let bounded: Vec<String> = bounded.map(Family::to_string).collect();
        if problem.links.ranks() > 1 && !bounded.is_empty() {
            assumed.push(format!(
                "how much is sent depends on the values, and the most that it may be is priced, of {}",
                bounded.join(", ")
            ));
        }
        if args.per_node > 1 {
            assumed.push("links within a node: 20 us and 20 Gbit/s, or as fast as between nodes".into());
        }
        if args.per_node > 1 && problem.links.ranks().is_power_of_two() {
            let why = "what is gathered goes by recursive doubling, as in the lab; Gloo and NCCL gather around a ring, which crosses a NIC once";
            assumed.push(why.into());
        }
        if problem.links.ranks() == 1 {
            assumed.push("one worker has nobody to send to: only dense is listed".into());
        }
        let ranks = problem.links.ranks();
        if ranks > 1 && compressors.iter().any(|family| family.any().selects()) {
            let beyond = selected_by_one(Gain::FULL, CompressionRatio::new(LEAST_CR)?, ranks).get();
            assumed.push(format!(
                "art-ring and art-tree keep less than each rank for itself would, {:.0} % of what that is above the ratio: all in a \
                 rank's own turn, which is one in {ranks}, and a third in the others'",
                100.0 * beyond
            ));
        }
        Ok(assumed)
    }

    fn compare_with_dense(&mut self, policy: &TimeToQuality) {
        let Solved { costs, front, choice, buckets, .. } = &mut self.solved;
        let dense = costs.iter().filter(|r| r.is_dense()).map(Row::t_step_s).min_by(f64::total_cmp);
        let plans = buckets.iter_mut().flat_map(|searched| &mut searched.plans);
        for row in costs.iter_mut().chain(front).chain([choice]).chain(plans) {
            if let Some(plan) = &row.plan {
                let on_curve = |x: &Strategy| self.problem.gain_source(x) == GainSource::Curve;
                let any = plan.strategies().iter().any(on_curve);
                row.gain_source = if any { GainSource::Curve } else { GainSource::Definition };
                continue;
            }
            row.gain_source = self.problem.gain_source(&row.of.strategy);
            let (t_step_s, quality) = (row.t_step_s(), row.of.quality());
            let even = dense.and_then(|dense| policy.break_even(t_step_s, &quality, dense));
            row.break_even_gain = even.map(|gain| gain.max(quality.least_gain(policy.gain_floor)));
            row.t_quality_s = policy.seconds(t_step_s, &quality);
        }
    }

    fn json(&self) -> serde_json::Value {
        let solved = &self.solved;
        let mut choice = solved.choice.json();
        choice["why"] = solved.why.as_str().into();
        choice["policy"] = self.policy.into();
        let mut json = serde_json::json!({
            "costs": solved.costs.iter().map(Row::json).collect::<Vec<_>>(),
            "front": solved.front.iter().map(Row::json).collect::<Vec<_>>(),
            "choice": choice,
            "assumed": self.assumed,
        });
        if let Some(searched) = &solved.buckets {
            json["solver"] = searched.json();
        }
        json
    }
}

impl Solved {
    /// One ratio for the whole gradient.
    fn one(problem: &Problem, spaces: &[Space], config: &PolicyConfig) -> Result<Self> {
        let mut seen = BTreeSet::new();
        let mut all: Vec<Strategy> = spaces.iter().flat_map(Space::strategies).collect();
        all.retain(|strategy| seen.insert(*strategy));
        let solution = solve_among(problem, &all, config.policy()).context("failed to plan")?;
        Ok(Self {
            costs: solution.candidates.iter().map(Row::from).collect(),
            front: solution.front.iter().map(|&i| Row::from(&solution.candidates[i])).collect(),
            choice: Row::from(solution.chosen()),
            marked: (solution.front, Some(solution.choice.index)),
            why: solution.choice.why,
            buckets: None,
        })
    }

    /// The compute time from which on dense is best by time-to-quality, of candidates that were priced without any.
    fn dense_from(&self, policy: &TimeToQuality, overlap: f64) -> f64 {
        let (dense, others): (Vec<_>, Vec<_>) = self.costs.iter().partition(|row| row.is_dense());
        let dense = dense.iter().map(|row| row.t_step_s()).fold(f64::INFINITY, f64::min);
        let others = others.iter().map(|row| (row.t_step_s(), row.of.quality()));
        let eligible = others.filter(|(_, quality)| quality.effective_gain() >= policy.gain_floor);
        eligible.map(|(t_step_s, quality)| policy.dense_from(t_step_s, &quality, dense, overlap)).fold(0.0, f64::max)
    }
}

/// A candidate as it is shown.
#[derive(Debug, Clone)]
struct Row {
    of: Evaluated,
    /// The share of values that is kept.
    cr: f64,
    /// For the progress of a dense step.
    t_quality_s: f64,
    /// Least gain at which time to quality would be that of the best dense one; absent where there is none.
    break_even_gain: Option<f64>,
    /// Where strategies differ from bucket to bucket; `of` has the last one's, and the share of all values is kept.
    plan: Option<flexcomm_domain::Plan>,
    /// Where its gain comes from.
    gain_source: GainSource,
}

impl From<&Evaluated> for Row {
    fn from(of: &Evaluated) -> Self {
        let cr = of.strategy.cr().get();
        let t_quality_s = of.t_step.get();
        let gain_source = GainSource::Definition;
        Self { of: of.clone(), cr, t_quality_s, break_even_gain: None, plan: None, gain_source }
    }
}

impl Row {
    fn is_dense(&self) -> bool {
        self.plan.is_none() && self.of.strategy.is_dense()
    }

    fn is_on_curve(&self) -> bool {
        self.gain_source == GainSource::Curve
    }

    fn t_step_s(&self) -> f64 {
        self.of.t_step.get()
    }

    /// Whether it differs by the way its messages travel at most.
    fn same_compression(&self, other: &Self) -> bool {
        self.of.strategy.family() == other.of.strategy.family() && self.cr == other.cr
    }

    fn json(&self) -> serde_json::Value {
        let strategy = &self.of.strategy;
        let one = self.plan.is_none();
        serde_json::json!({
            "strategy": self.plan.as_ref().map_or_else(|| strategy.to_string(), ToString::to_string),
            "compressor": one.then(|| strategy.family().name()),
            "collective": one.then(|| strategy.collective()),
            "cr": self.cr,
            "t_comp_s": self.of.t_comp.get(),
            "t_sync_s": self.of.t_sync.get(),
            "t_step_s": self.t_step_s(),
            "gain": self.of.gain.get(),
            "variance": self.of.variance,
            "t_quality_s": self.t_quality_s,
            "break_even_gain": self.break_even_gain,
        })
    }
}

/// Longest forward and backward pass that is named: no step takes hours.
const MOST_COMPUTE_S: f64 = 3600.0;

/// What it means that no compute time was given: a step of communication alone is where compression saves most, so the
/// compute time matters from which on dense is best. Known of time-to-quality alone: other policies may choose dense,
/// compression and dense again as it grows.
fn without_compute(dense_from: Option<f64>) -> Result<String> {
    let no_compute = "no --compute was given, so that computing takes no time and compression saves its largest share";
    Ok(match dense_from {
        Some(0.0) => format!("{no_compute}: with any, dense is best all the more"),
        Some(from) if from <= MOST_COMPUTE_S => {
            // Two digits, rounded up.
            let digit = 10f64.powf(from.log10().floor() - 1.0);
            let from = Seconds::new((from / digit).ceil() * digit)?;
            format!(
                "{no_compute}; where a forward and backward pass takes {from} or more, dense is best: give --compute"
            )
        }
        Some(_) | None => format!("{no_compute}: give it for real step times"),
    })
}

/// What is told of the gain that is assumed, where the gain of any candidate rests on it.
fn about_curve(args: &Args, problem: &Problem, spaces: &[Space]) -> Option<String> {
    let strategies = spaces.iter().flat_map(Space::strategies);
    let on_curve = |x: &Strategy| problem.gain_source(x) == GainSource::Curve;
    let resting: BTreeSet<Family> = strategies.filter(on_curve).map(|x| x.family()).collect();
    if resting.is_empty() {
        return None;
    }
    Some(match args.gain.is_none() && resting.iter().any(Family::has_ratio) {
        true => "gain(c) = c^0.6: give --gain for measured ones".into(),
        false => {
            let names = resting.iter().map(Family::to_string).collect::<Vec<_>>().join(", ");
            format!("gain(c) = c^0.6 at the share of bytes of {names}: --gain is of what keeps a share of the values")
        }
    })
}

fn network(args: &Args) -> Result<(LinkMatrix, String)> {
    if let Some(path) = &args.links {
        let links = files::load(path, files::parse_links)?;
        let n = links.ranks();
        if let Some(given) = args.workers.filter(|w| *w as usize != n) {
            bad_argument!("--workers is {given} but {} has links of {}", path.display(), workers(n));
        }
        return Ok((links, format!("{}, links of {}", workers(n), path.display())));
    }
    let (Some(n), Some(alpha), Some(bandwidth)) = (args.workers, args.latency, args.bandwidth) else {
        bad_argument!("--workers, --latency and --bandwidth are needed, or --links");
    };
    let (between, per_node) = (Link { alpha, bandwidth }, args.per_node);
    if per_node > 1 && per_node >= n {
        bad_argument!("--per-node is {per_node} of {}: no link would be between nodes", workers(n as usize));
    }
    if per_node == 1 {
        let links = LinkMatrix::uniform(n as usize, between)?;
        return Ok((links, format!("{}, every link {alpha} and {bandwidth}", workers(n as usize))));
    }
    let nodes = (0..n).map(|rank| rank / per_node).collect();
    let links = LinkMatrix::uniform(n as usize, between)?.on_nodes(nodes)?.with_local_links();
    let up_to = if n.is_multiple_of(per_node) { "" } else { "up to " };
    Ok((links, format!("{n} workers, {up_to}{per_node} on each node, between nodes {alpha} and {bandwidth}")))
}

fn policy(args: &Args) -> Result<PolicyConfig> {
    let is_set = args.gain_floor.is_some() || args.exponent.is_some() || args.steps.is_some();
    match &args.policy {
        config if !is_set => Ok(config.clone()),
        PolicyConfig::TimeToQuality(default) => Ok(PolicyConfig::TimeToQuality(TimeToQuality {
            gain_floor: args.gain_floor.unwrap_or(default.gain_floor),
            exponent: args.exponent.or(default.exponent),
            steps: args.steps.map(|steps| steps as f64).or(default.steps),
            ..*default
        })),
        other => {
            let name = other.policy().name();
            bad_argument!("--gain-floor, --exponent and --steps belong to time-to-quality, not to {name}")
        }
    }
}

/// Adds ratios, each once.
fn add_absent(crs: &mut Vec<CompressionRatio>, more: Vec<CompressionRatio>) {
    for cr in more {
        if !crs.contains(&cr) {
            crs.push(cr);
        }
    }
}

/// One for each compressor, dense being in all of them. One worker has dense alone.
fn spaces(args: &Args, candidates: &[Candidate], ranks: usize) -> Result<Vec<Space>> {
    let given: Result<Vec<CompressionRatio>, _> = args.crs.iter().map(|r| CompressionRatio::new(r.0)).collect();
    let mut crs = Vec::new();
    add_absent(&mut crs, given?);
    if crs.len() > MAX_CRS {
        bad_argument!("--crs lists {} ratios, at most {MAX_CRS} are allowed", crs.len());
    }
    let space = |compressors: Vec<Family>, crs: Vec<CompressionRatio>| {
        let collectives = Collective::ALL.to_vec();
        Space { crs, compressors, collectives, selections: args.selection.clone() }
    };
    let mut spaces: Vec<Space> = Vec::new();
    for one in candidates.iter().filter(|one| ranks > 1 || one.family.has_ratio()) {
        let crs = if ranks == 1 { Vec::new() } else { one.ratio.map_or_else(|| crs.clone(), |own| vec![own]) };
        match spaces.iter_mut().find(|space| space.compressors == [one.family]) {
            Some(same) => add_absent(&mut same.crs, crs),
            None => spaces.push(space(vec![one.family], crs)),
        }
    }
    if spaces.is_empty() {
        spaces.push(space(Vec::new(), Vec::new()));
    }
    if let Some(space) = spaces.iter().find(|space| space.crs.len() > MAX_CRS) {
        bad_argument!("{} has {} ratios, at most {MAX_CRS} are allowed", space.compressors[0], space.crs.len());
    }
    Ok(spaces)
}

#[cfg(test)]
mod tests;
