//! A strategy for each bucket: reads the buckets, and lets the planner search.

use super::{Args, Row, Solved, files};
use anyhow::Result;
use flexcomm_domain::{MAX_BUCKETS, Plan};
use flexcomm_optimizer::{Choice, Evaluated, PolicyConfig, Problem, pareto};
use flexcomm_planner::{ByBucket, JobPolicy};
use std::path::Path;
use std::time::{Duration, Instant};

/// The buckets as given, in the order of backward.
pub(super) struct Buckets(Vec<files::BucketRow>);

impl Buckets {
    pub(super) fn values(&self) -> u64 {
        self.0.iter().map(|b| b.values).sum()
    }
}

/// What a search found, and how.
pub(super) struct Searched {
    pub(super) names: Vec<String>,
    pub(super) values: Vec<u64>,
    pub(super) took: Duration,
    pub(super) seed: u64,
    equal_energy: bool,
    /// Plans of several strategies, the best by time to quality first.
    pub(super) plans: Vec<Row>,
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
    };
    Ok(Buckets((0..count).map(one).collect()))
}

/// One strategy for all buckets, or one for each, whichever the policy picks. `whole` are the strategies over the whole gradient.
pub(super) fn solve(
    problem: &Problem,
    buckets: &Buckets,
    (args, whole): (&Args, Vec<Evaluated>),
    config: &PolicyConfig,
) -> Result<Solved> {
    let began = Instant::now();
    let values: Vec<u64> = buckets.0.iter().map(|b| b.values).collect();
    let energies: Vec<f32> = buckets.0.iter().filter_map(|b| b.energy.map(|energy| energy as f32)).collect();
    let job = flexcomm_planner::Buckets::new((&values, &energies), problem.compute, whole, config.clone());
    let alike = job.alike();
    let least_gain = Some(config.gain_floor()).filter(|floor| *floor > 0.0);
    let found = job.by_bucket(args.seed, &JobPolicy { least_gain, ..JobPolicy::default() });
    let all: Vec<Evaluated> = alike.iter().chain(found.iter().map(|plan| &plan.judged)).cloned().collect();
    let plans = found.into_iter().map(|ByBucket { plan, what, log_steps, .. }| {
        let cr = values.iter().enumerate().map(|(i, n)| *n as f64 * plan.of(i).cr().get()).sum::<f64>();
        let t_quality_s = what.t_step.get() * log_steps.exp();
        Row { cr: cr / problem.values as f64, t_quality_s, plan: Some(plan), ..Row::from(&what) }
    });
    let rows: Vec<Row> = alike.iter().map(Row::from).chain(plans).collect();
    let (costs, plans) = rows.split_at(alike.len());
    let choose =
        |among: &[Evaluated]| config.policy().choose(among, &(0..among.len()).collect::<Vec<_>>(), problem.compute);
    let choice = match config {
        // What several strategies lose is not the law of what they keep in the mean.
        PolicyConfig::TimeToQuality(policy) => {
            let choice = choose(&alike);
            let one = &alike[choice.index];
            let one_s = policy.seconds(one.t_step.get(), &one.quality());
            match plans.first().map(|best| best.t_quality_s).filter(|best_s| *best_s < one_s) {
                Some(best_s) => Choice {
                    index: costs.len(),
                    why: format!(
                        "the progress of a dense step takes {:.3} ms, and {:.3} ms by the best strategy for all buckets",
                        best_s * 1e3,
                        one_s * 1e3
                    ),
                    ..choice
                },
                None => choice,
            }
        }
        _ => {
            let choice = choose(&all);
            match &rows[choice.index].plan {
                Some(plan) => {
                    Choice { why: format!("{}: {plan} has the best score", config.policy().name()), ..choice }
                }
                None => choice,
            }
        }
    };
    let mut front = pareto::front(&all);
    front.sort_by(|a, b| all[*a].t_sync.get().total_cmp(&all[*b].t_sync.get()));
    let searched = Searched {
        names: buckets.0.iter().map(|b| b.name.clone()).collect(),
        took: began.elapsed(),
        seed: args.seed,
        equal_energy: energies.len() < values.len(),
        values,
        plans: plans.to_vec(),
    };
    let of_one = |i: &usize| *i < costs.len();
    Ok(Solved {
        marked: (front.iter().copied().filter(of_one).collect(), Some(choice.index).filter(of_one)),
        front: front.iter().map(|i| rows[*i].clone()).collect(),
        choice: rows[choice.index].clone(),
        why: choice.why,
        buckets: Some(searched),
        costs: costs.to_vec(),
    })
}

impl Searched {
    pub(super) fn assumed(&self) -> Vec<String> {
        let energy = "every value of the gradient has the same energy: give energy per bucket";
        let hidden =
            "buckets become ready during the last 60 % of computing, each after as much of it as it has of the values";
        let energy = self.equal_energy.then_some(energy);
        energy.into_iter().chain([hidden]).map(str::to_owned).collect()
    }

    /// Neighbours with one strategy: the name of the first and of the last, all their values, and the strategy.
    pub(super) fn runs(&self, plan: &Plan) -> Vec<(String, u64, String)> {
        let buckets: Vec<usize> = (0..self.names.len()).collect();
        let run = |run: &[usize]| {
            let (first, last) = (run[0], run[run.len() - 1]);
            let (from, to) = (&self.names[first], &self.names[last]);
            let name = match run.len() {
                1 => from.clone(),
                _ if from.parse::<u64>().is_ok() => format!("{from}-{to}"),
                count => format!("{from} to {to} ({count})"),
            };
            (name, self.values[first..=last].iter().sum(), plan.of(first).to_string())
        };
        buckets.chunk_by(|a, b| plan.of(*a) == plan.of(*b)).map(run).collect()
    }

    pub(super) fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "name": "nsga-ii",
            "seed": self.seed,
            "buckets": self.names.len(),
            "plans": self.plans.iter().map(Row::json).collect::<Vec<_>>(),
            "seconds": self.took.as_secs_f64(),
        })
    }
}
