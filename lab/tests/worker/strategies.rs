//! Every strategy end to end over TCP: equal parameters on all ranks at every step, and training works.

use crate::common::Ranks;
use flexcomm_domain::Collective;

const STRATEGIES: [&str; 15] = [
    "topk@0.1/allgather",
    "lwtopk@0.1/allgather",
    "mstopk@0.1/allgather",
    "topk@0.1/art-ring:star",
    "topk@0.1/art-ring:var",
    "topk@0.1/art-tree:star",
    "topk@0.1/art-tree:var",
    "mstopk@0.1/art-ring:star",
    "mstopk@0.1/art-tree:var",
    "fp16/dense-ring",
    "bf16+ef(vanilla)/dense-tree",
    "powersgd(rank=4)+ef(vanilla)/dense-tree",
    "qsgd(s=7,norm=max)+ef(vanilla)/allgather",
    // Of a size that depends on the values.
    "dgc(k=0.1)+ef(vanilla)/allgather",
    // Fewer values than ranks: some chunks are empty.
    "topk@0.0001/art-ring:var",
];

/// Dense by each collective that adds up, and [`STRATEGIES`].
fn strategies() -> Vec<String> {
    let sums = Collective::ALL.iter().filter(|collective| collective.is_allreduce());
    sums.map(|collective| format!("none/{collective}")).chain(STRATEGIES.map(Into::into)).collect()
}

fn train(world: usize, strategy: &str, steps: u64) -> (f64, Vec<String>) {
    let ranks = Ranks::start(world, &[&format!("--strategy={strategy}"), &format!("--steps={steps}")]);
    let (ends, log) = ranks.join();
    assert_eq!(log.len() as u64, steps);
    assert!(ends.iter().all(|end| end.steps == steps && !end.stopped));
    (ends[0].accuracy.unwrap(), log)
}

#[test]
fn parameters_stay_equal_for_each_strategy_and_number_of_ranks() {
    for world in 1..=5 {
        for strategy in &strategies() {
            let (_, log) = train(world, strategy, 6);
            let hash = |line: &str| line.rsplit(',').next().unwrap().to_owned();
            assert_ne!(hash(&log[0]), hash(&log[5]), "{strategy} on {world} ranks: parameters do not move");
        }
    }
}

#[test]
fn every_strategy_learns() {
    let all = strategies();
    for strategy in &all[..all.len() - 1] {
        let (before, _) = train(4, strategy, 1);
        let (after, _) = train(4, strategy, 150);
        assert!(after > 0.8, "{strategy}: accuracy {before} after one step, {after} after 150");
    }
}

#[test]
fn the_same_seed_gives_the_same_bits_and_another_does_not() {
    let run = |seed: &str| Ranks::start(3, &[seed, "--steps=10", "--strategy=mstopk@0.05/allgather"]).join().1;
    assert_eq!(run("--seed=5"), run("--seed=5"));
    assert_ne!(run("--seed=5"), run("--seed=6"));
}

#[test]
fn ranks_started_differently_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let ranks = Ranks::start_with(2, |rank| vec![format!("--seed={rank}"), "--steps=3".into()], folder);
    let (ends, _folder) = ranks.results();
    let texts: Vec<_> = ends.into_iter().map(|end| format!("{:#}", end.unwrap_err())).collect();
    assert!(texts.iter().any(|t| t.contains("started with another")), "{texts:?}");
}

#[test]
fn dense_training_ends_in_the_step_in_which_values_are_not_finite_and_names_their_ranks() {
    for collective in ["dense-ring", "dense-tree"] {
        let args = |_| vec![format!("--strategy=none/{collective}"), "--steps=5".into()];
        let spoil = |rank: usize| {
            let bad = [None, Some(f32::NAN), Some(f32::INFINITY)][rank];
            let mut step = 0;
            move |gradient: &mut Vec<f32>| {
                if let Some(bad) = bad.filter(|_| step == 2) {
                    let at = gradient.len() / 2 + rank;
                    gradient[at] = bad;
                }
                step += 1;
            }
        };
        let ranks = Ranks::start_spoiled(3, args, tempfile::tempdir().unwrap(), Box::new(|_| {}), spoil);
        for end in ranks.results().0 {
            let text = format!("{:#}", end.unwrap_err());
            assert!(text.starts_with("step 2 ") && text.contains("those of rank 1, 2"), "{text}");
        }
    }
}
