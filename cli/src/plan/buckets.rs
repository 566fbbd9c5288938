//! A ratio per bucket: reads the buckets, solves the larger problem, and says by what solver and why.

use super::{Args, Row, Solved, files};
use anyhow::{Context, Result};
use flexcomm_domain::Family;
use flexcomm_optimizer::buckets::{MAX_BUCKETS, MAX_ENUMERATED};
use flexcomm_optimizer::{
    Bucket, BucketProblem, BucketSolution, PolicyConfig, Problem, Profile, ProfilePoint, Solver, Space, evaluate_plans,
    solve_buckets,
};
use std::path::Path;
use std::time::{Duration, Instant};

/// The buckets as given.
pub(super) struct Buckets(Vec<files::BucketRow>);

impl Buckets {
    pub(super) fn values(&self) -> u64 {
        self.0.iter().map(|b| b.values).sum()
    }

    /// Whether some gain is not the file's own.
    pub(super) fn lacks_gain(&self) -> bool {
        self.0.iter().any(|b| b.gain_exponent.is_none())
    }
}

/// A solved problem of buckets and how it was solved.
pub(super) struct Searched {
    pub(super) solution: BucketSolution,
    pub(super) names: Vec<String>,
    pub(super) values: Vec<u64>,
    pub(super) took: Duration,
    plans: f64,
    seed: u64,
    equal_energy: bool,
    /// The compressor that was solved for, and those that were not.
    family: Family,
    left_out: Vec<Family>,
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

/// A ratio for each bucket.
pub(super) fn solve(
    problem: &Problem,
    buckets: &Buckets,
    (args, spaces): (&Args, &[Space]),
    policy: &PolicyConfig,
) -> Result<Solved> {
    let posed =
        spaces.iter().find_map(|space| Some((space, space.compressors.iter().copied().find(Family::has_ratio)?)));
    let Some((space, family)) = posed else {
        bad_argument!("--buckets solves for a ratio per bucket, and none of the compressors has one: name topk");
    };
    let whole = problem.profiles.get(&family.into());
    let posed: Result<Vec<Bucket>> = buckets.0.iter().map(|row| bucket(row, problem.values, whole, space)).collect();
    let began = Instant::now();
    let large = BucketProblem::new(problem, &posed?, space, family).context("failed to plan")?;
    let (plans, uniform) = (large.size(), large.uniform());
    let shown = evaluate_plans(problem, &large, &uniform).context("failed to plan")?;
    let solution = solve_buckets(problem, large, policy, args.seed).context("failed to plan")?;
    let uniform = shown.iter().zip(&uniform).map(|(e, p)| Row { cr: p.plan.crs[0].get(), ..Row::from(e) });
    let front: Vec<Row> = solution.candidates.iter().zip(&solution.front).map(Row::of_plan).collect();
    let searched = Searched {
        names: buckets.0.iter().map(|b| b.name.clone()).collect(),
        values: buckets.0.iter().map(|b| b.values).collect(),
        took: began.elapsed(),
        plans,
        seed: args.seed,
        family,
        left_out: spaces
            .iter()
            .flat_map(|space| &space.compressors)
            .copied()
            .filter(|other| *other != family)
            .collect(),
        equal_energy: buckets.0.iter().any(|b| b.energy.is_none()),
        solution,
    };
    Ok(Solved {
        costs: uniform.collect(),
        marked: (Vec::new(), None),
        choice: front[searched.solution.choice.index].clone(),
        front,
        why: searched.solution.choice.why.clone(),
        buckets: Some(searched),
    })
}

/// The bucket with a profile of its own: its exponent's, or the whole gradient's with its share of the time.
fn bucket(row: &files::BucketRow, all: u64, whole: Option<&Profile>, space: &Space) -> Result<Bucket> {
    let prior = Profile::prior(row.values);
    let whole = whole.unwrap_or(&prior);
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
    Ok(Bucket { values: row.values, energy: row.energy.unwrap_or(row.values as f64), profile })
}

impl Searched {
    pub(super) fn assumed(&self) -> Vec<String> {
        let energy = "every value of the gradient has the same energy: give energy per bucket";
        let mut assumed: Vec<String> = self.equal_energy.then(|| energy.to_owned()).into_iter().collect();
        if !self.left_out.is_empty() {
            let names = self.left_out.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            assumed.push(format!("a ratio per bucket is solved for {} alone; left out: {names}", self.family));
        }
        assumed
    }

    /// Which solver, and why that one.
    pub(super) fn why(&self) -> String {
        match self.solution.solver {
            Solver::Enumeration => format!("{} plans are few enough to list them all", self.plans),
            Solver::NsgaII => format!("{:.1e} plans are more than the {MAX_ENUMERATED} that are listed", self.plans),
        }
    }

    pub(super) fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "name": self.solution.solver.as_str(),
            "why": self.why(),
            "seed": self.seed,
            "buckets": self.names.len(),
            "plans": self.plans,
            "front": self.solution.front.len(),
            "seconds": self.took.as_secs_f64(),
        })
    }
}
