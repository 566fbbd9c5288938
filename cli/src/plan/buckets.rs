//! A ratio per bucket: reads the buckets, solves the larger problem, and says by what solver and why.

use super::{Args, Row, Solved, bytes_of, files};
use anyhow::{Context, Result};
use flexcomm_domain::{Family, Strategy};
use flexcomm_optimizer::buckets::{MAX_BUCKETS, MAX_ENUMERATED};
use flexcomm_optimizer::{
    Bucket, BucketProblem, Evaluated, PolicyConfig, Problem, Profile, ProfilePoint, Solver, Space, evaluate_alike,
    evaluate_plans, pareto, solve_buckets,
};
use std::path::Path;
use std::time::{Duration, Instant};

/// The buckets as given.
pub(super) struct Buckets(Vec<files::BucketRow>);

impl Buckets {
    pub(super) fn values(&self) -> u64 {
        self.0.iter().map(|b| b.values).sum()
    }

    /// Whether each has a curve of its own for the gain of what keeps a share of its values.
    pub(super) fn have_gains(&self) -> bool {
        self.0.iter().all(|b| b.gain_exponent.is_some())
    }
}

/// A solved problem of buckets and how it was solved.
pub(super) struct Searched {
    pub(super) names: Vec<String>,
    pub(super) values: Vec<u64>,
    pub(super) took: Duration,
    seed: u64,
    equal_energy: bool,
    compressors: Vec<OfCompressor>,
    /// Which of them tells of the solver: the chosen one, or the first that was solved.
    told: usize,
    /// Plans on the front over all compressors.
    front: usize,
}

/// What came of one compressor.
struct OfCompressor {
    family: Family,
    /// Absent where it has no ratio to solve for: all buckets are alike.
    solver: Option<Solver>,
    /// Plans there are.
    plans: f64,
    /// Those with one ratio for all buckets.
    uniform: Vec<Row>,
    /// Its front without dense plans, by rising t_sync.
    front: Vec<Row>,
    /// The position in `front` of what the policy picks there; absent where no plan keeps enough.
    best: Option<usize>,
}

/// So many equal buckets of the gradient, or a file of them.
pub(super) fn read(text: &str, params: Option<u64>) -> Result<Buckets> {
    let Ok(count) = text.trim().parse::<f64>() else {
        let buckets = Buckets(files::load(Path::new(text), files::parse_buckets)?);
        let values = buckets.values();
        if let Some(params) = params.filter(|p| *p != values) {
            bad_argument!("--params is {params} but the buckets of {text} have {values} values");
        }
        return Ok(buckets);
    };
    let fits = count.fract() == 0.0 && (1.0..=MAX_BUCKETS as f64).contains(&count);
    if !fits {
        bad_argument!("--buckets is {text}, allowed are 1 to {MAX_BUCKETS}, or a file");
    }
    let (Some(params), count) = (params, count as u64) else { bad_argument!("--buckets N needs --params") };
    if count > params {
        bad_argument!("--buckets is {count}, more than the {params} values of --params");
    }
    let one = |i: u64| files::BucketRow {
        name: (i + 1).to_string(),
        values: params / count + u64::from(i < params % count),
        energy: None,
        gain_exponent: None,
    };
    Ok(Buckets((0..count).map(one).collect()))
}

/// A ratio for each bucket, by the compressor that does best; what has no ratio compresses all buckets alike.
pub(super) fn solve(
    problem: &Problem,
    buckets: &Buckets,
    (args, spaces): (&Args, &[Space]),
    policy: &PolicyConfig,
) -> Result<Solved> {
    let families = || spaces.iter().flat_map(|space| space.compressors.iter().map(move |family| (space, *family)));
    if !families().any(|(_, family)| family.has_ratio()) {
        bad_argument!("--buckets solves for a ratio per bucket, and none of the compressors has one: name topk");
    }
    let began = Instant::now();
    let of = |(space, family): (&Space, Family)| match family.has_ratio() {
        true => with_ratios(problem, buckets, (space, family), (policy, args.seed)),
        false => alike(problem, buckets, (space, family), policy),
    };
    let mut compressors = families().map(of).collect::<Result<Vec<_>>>()?;
    let mut costs: Vec<Row> = Vec::new();
    for row in compressors.iter_mut().flat_map(|of| std::mem::take(&mut of.uniform)) {
        // Dense is in every compressor's problem.
        if !row.is_dense() || !costs.iter().any(|known| known.of.strategy == row.of.strategy) {
            costs.push(row);
        }
    }
    let dense = costs.iter().filter(|row| row.is_dense()).map(|row| dense_plan(row, buckets));
    let rows: Vec<Row> = dense.chain(compressors.iter().flat_map(|of| of.front.clone())).collect();
    let evaluated: Vec<Evaluated> = rows.iter().map(|row| row.of.clone()).collect();
    let mut on_front = pareto::front(&evaluated);
    let choice = policy.policy().choose(&evaluated, &on_front, problem.compute);
    on_front.sort_by(|a, b| evaluated[*a].t_sync.get().total_cmp(&evaluated[*b].t_sync.get()));
    let chosen = rows[choice.index].clone();
    let told = |of: &OfCompressor| of.solver.is_some() && of.family == chosen.of.strategy.family();
    let told = compressors.iter().position(told).or(compressors.iter().position(|of| of.solver.is_some()));
    let searched = Searched {
        names: buckets.0.iter().map(|b| b.name.clone()).collect(),
        values: buckets.0.iter().map(|b| b.values).collect(),
        took: began.elapsed(),
        seed: args.seed,
        equal_energy: buckets.0.iter().any(|b| b.energy.is_none()),
        told: told.unwrap_or_default(),
        front: on_front.len(),
        compressors,
    };
    Ok(Solved {
        costs,
        marked: (Vec::new(), None),
        front: on_front.iter().map(|i| rows[*i].clone()).collect(),
        choice: chosen,
        why: choice.why,
        buckets: Some(searched),
    })
}

/// One row with a ratio of 1 for each bucket.
fn dense_plan(row: &Row, buckets: &Buckets) -> Row {
    Row { bucket_crs: Some(vec![1.0; buckets.0.len()]), ..row.clone() }
}

/// What the policy picks of one compressor's plans.
fn best_of(problem: &Problem, front: &[Row], policy: &PolicyConfig) -> Option<usize> {
    let evaluated: Vec<Evaluated> = front.iter().map(|row| row.of.clone()).collect();
    let all: Vec<usize> = (0..evaluated.len()).collect();
    let any = !evaluated.is_empty();
    any.then(|| policy.policy().choose(&evaluated, &all, problem.compute).index)
}

fn with_ratios(
    problem: &Problem,
    buckets: &Buckets,
    (space, family): (&Space, Family),
    (policy, seed): (&PolicyConfig, u64),
) -> Result<OfCompressor> {
    let whole = problem.profiles.get(&family.into());
    let posed: Result<Vec<Bucket>> = buckets.0.iter().map(|row| bucket(row, problem.values, whole, space)).collect();
    let large = BucketProblem::new(problem, &posed?, space, family).context("failed to plan")?;
    let (plans, uniform) = (large.size(), large.uniform());
    let shown = evaluate_plans(problem, &large, &uniform).context("failed to plan")?;
    let solution = solve_buckets(problem, large, policy, seed).context("failed to plan")?;
    let uniform = shown.iter().zip(&uniform).map(|(e, p)| Row { cr: p.plan.crs[0].get(), ..Row::from(e) });
    let points = solution.candidates.iter().zip(&solution.front).map(Row::of_plan);
    let front: Vec<Row> = points.filter(|row| !row.is_dense()).collect();
    let best = best_of(problem, &front, policy);
    Ok(OfCompressor { family, solver: Some(solution.solver), plans, uniform: uniform.collect(), front, best })
}

fn alike(
    problem: &Problem,
    buckets: &Buckets,
    (space, family): (&Space, Family),
    policy: &PolicyConfig,
) -> Result<OfCompressor> {
    let values: Vec<u64> = buckets.0.iter().map(|b| b.values).collect();
    // A codec that cannot be built was refused for the whole gradient.
    let codec = |values: u64| bytes_of(family, values).unwrap_or_else(|_| problem.codec(family));
    let row = |strategy: Strategy| -> Result<Row> {
        let one = evaluate_alike(problem, &strategy, &values, codec).context("failed to plan")?;
        Ok(Row::from(&one))
    };
    let strategies = space.strategies().into_iter().filter(|strategy| !strategy.is_dense());
    let uniform = strategies.map(row).collect::<Result<Vec<Row>>>()?;
    let keeps = |row: &&Row| row.of.quality().effective_gain() >= policy.gain_floor();
    let front: Vec<Row> = uniform.iter().filter(keeps).map(|row| dense_plan(row, buckets)).collect();
    let best = best_of(problem, &front, policy);
    Ok(OfCompressor { family, solver: None, plans: uniform.len() as f64, uniform, front, best })
}

/// The bucket with a profile of its own: its exponent's, or the whole gradient's with its share of the time. None where the whole
/// gradient has none, as of unbiased compressors: their variance and their own times count.
fn bucket(row: &files::BucketRow, all: u64, whole: Option<&Profile>, space: &Space) -> Result<Bucket> {
    let bucket = Bucket { values: row.values, energy: row.energy.unwrap_or(row.values as f64), profile: None };
    let Some(whole) = whole else { return Ok(bucket) };
    let share = row.values as f64 / all as f64;
    let point = |c: &flexcomm_domain::CompressionRatio| {
        let gain = match row.gain_exponent {
            Some(exponent) => flexcomm_domain::Gain::new(c.get().powf(exponent))?,
            None => whole.gain(*c),
        };
        Ok(ProfilePoint { cr: *c, gain, t_comp_s: whole.t_comp(*c) * share, weight: 1.0 })
    };
    let points: Result<Vec<ProfilePoint>> = space.crs.iter().map(point).collect();
    let points = points.with_context(|| format!("bucket {}: gain_exponent", row.name))?;
    // Without ratios (one worker) nothing is compressed and no profile is needed.
    let profile = if points.is_empty() { None } else { Some(Profile::new(points)?) };
    Ok(Bucket { profile, ..bucket })
}

impl Searched {
    pub(super) fn assumed(&self) -> Vec<String> {
        let energy = "every value of the gradient has the same energy: give energy per bucket";
        self.equal_energy.then(|| energy.to_owned()).into_iter().collect()
    }

    /// Rows whose times for the progress of a dense step are still to be set.
    pub(super) fn rows(&mut self) -> impl Iterator<Item = &mut Row> {
        self.compressors.iter_mut().flat_map(|of| &mut of.front)
    }

    /// Which solver.
    pub(super) fn solver(&self) -> &'static str {
        self.compressors[self.told].solver.map_or("none", Solver::as_str)
    }

    /// Why that one.
    pub(super) fn why(&self) -> String {
        let OfCompressor { solver, plans, family, .. } = &self.compressors[self.told];
        let of = if self.compressors.len() > 1 { format!(" of {family}") } else { String::new() };
        match solver {
            Some(Solver::NsgaII) => format!("{plans:.1e} plans{of} are more than the {MAX_ENUMERATED} that are listed"),
            Some(Solver::Enumeration) | None => format!("{plans} plans{of} are few enough to list them all"),
        }
    }

    pub(super) fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "name": self.solver(),
            "why": self.why(),
            "seed": self.seed,
            "buckets": self.names.len(),
            "plans": self.compressors[self.told].plans,
            "front": self.front,
            "seconds": self.took.as_secs_f64(),
            "compressors": self.compressors.iter().filter_map(OfCompressor::json).collect::<Vec<_>>(),
        })
    }
}

impl OfCompressor {
    /// Its best plan; nothing where none keeps enough.
    fn json(&self) -> Option<serde_json::Value> {
        let mut json = self.front[self.best?].json();
        json["spec"] = self.family.to_string().into();
        json["solver"] = self.solver.map(Solver::as_str).into();
        Some(json)
    }
}
