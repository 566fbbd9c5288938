//! On the host.

use crate::ranks::{Plan, Seen, ranks as ranks_of, step};
use flexcomm_compression::pipeline::Member;
use flexcomm_exchange::{Arrived, Bucket, Host, How, Leader, Param, Ran, Status, Store, lock};

const PARAMS: [Param; 3] =
    [Param { id: 0, len: 96, cols: 12 }, Param { id: 1, len: 5, cols: 1 }, Param { id: 2, len: 64, cols: 8 }];
const N: usize = 165;

fn ranks(spec: &str, world: u32) -> Vec<Bucket> {
    ranks_of(spec, world, &PARAMS)
}

fn gradient(step: u64, rank: u64) -> Vec<f32> {
    (0..N as u64).map(|i| ((i * 37 + step * 101 + rank * 59) % 97) as f32 / 50.0 - 0.97).collect()
}

fn gradients(index: u64, world: u64) -> Vec<Vec<f32>> {
    (0..world).map(|rank| gradient(index, rank)).collect()
}

fn good(seen: &Seen) -> bool {
    seen.ends.iter().all(|end| *end == seen.ends[0]) && seen.ends[0].0 == Ok(Ran::Good)
}

/// Compressors and, for AR-Topk, who leads.
const EXCHANGES: [(&str, Option<Option<u32>>); 11] = [
    ("none", None),
    ("qsgd(s=4)", None),
    ("threshold(v=0.5)+ef(vanilla)", None),
    ("topk(k=0.1)+ef(vanilla)+nesterov(mu=0.9)", None),
    ("topk(k=0.1)+ef(vanilla)+values(int8)", None),
    ("powersgd(rank=2)+ef(vanilla)", None),
    ("randomk(k=0.2)+ef(vanilla)", None),
    ("gradiveq(d=2,slice=8,every=2)", None),
    ("topk(k=0.1)+ef(vanilla)", Some(Some(1))),
    ("mstopk(k=0.1)+ef(vanilla)", Some(None)),
    ("threshold(v=0.5)+ef(vanilla)", Some(None)),
];

fn led(leader: Option<Option<u32>>) -> Option<Leader> {
    leader.map(|rank| rank.map_or(Leader::Largest, Leader::Rank))
}

#[test]
fn a_layout_is_its_parameters_in_order() {
    let layout = |params: &[Param]| {
        let member = Member { seed: 0, rank: 0, world: 1, tensor: 0 };
        Bucket::new(0, params.to_vec(), member, None).unwrap().layout()
    };
    let mut swapped = PARAMS;
    swapped.swap(0, 2);
    let mut reshaped = PARAMS;
    reshaped[0].cols = 8;
    assert_eq!(layout(&PARAMS), layout(&PARAMS));
    assert!(layout(&swapped) != layout(&PARAMS) && layout(&reshaped) != layout(&PARAMS));
}

#[test]
fn all_ranks_get_the_same_bits() {
    for (spec, leader) in EXCHANGES {
        let mut ranks = ranks(spec, 3);
        for index in 0..6 {
            let seen = step(&mut ranks, &Plan { leader: led(leader), ..Plan::new(index, gradients(index, 3)) });
            assert!(good(&seen) && seen.ends[0].1.iter().any(|v| *v != 0.0), "{spec}: {:?}", seen.ends);
            let headers: Vec<u32> = seen.rounds.iter().filter_map(|round| round.header).collect();
            assert_eq!(headers, (0..headers.len() as u32).collect::<Vec<_>>(), "{spec}: headers are numbered");
        }
    }
}

/// With a hundred times as many rows of each parameter.
#[test]
fn fixed_bytes_are_those_that_do_not_grow_with_the_gradient() {
    let large = PARAMS.map(|param| Param { len: 100 * param.len, ..param });
    let seen = |spec: &str, leader, params: &[Param]| {
        let n = params.iter().map(|param| param.len).sum::<usize>();
        let gradients = (0..3).map(|rank| gradient(0, rank).into_iter().cycle().take(n).collect()).collect();
        step(&mut ranks_of(spec, 3, params), &Plan { leader: led(leader), ..Plan::new(0, gradients) })
    };
    for (spec, leader) in EXCHANGES {
        let (seen, grown) = (seen(spec, leader, &PARAMS), seen(spec, leader, &large));
        assert_eq!(seen.fixed, grown.fixed, "{spec}");
        for (round, fixed) in seen.rounds.iter().zip(&seen.fixed) {
            assert!(*fixed <= round.head_bytes() + round.bytes, "{spec}: {fixed} of {round:?}");
        }
    }
    // Control head; header with one parameter; number of indices, and the byte that names how they are written.
    let (head, header, indices) = (8, 32 + 8, 4 + 1);
    assert_eq!(seen("none", None, &PARAMS).fixed, [0]);
    assert_eq!(seen("topk(k=0.1)", None, &PARAMS).fixed, [head + header + indices]);
    assert_eq!(seen("lwtopk(k=0.1)", None, &PARAMS).fixed, [head + header + 3 * indices], "each tensor its own set");
    assert_eq!(seen("powersgd(rank=2)", None, &PARAMS).fixed, [0, 0]);
    let led_by_any = seen("topk(k=0.1)", Some(None), &PARAMS);
    assert_eq!(led_by_any.fixed, [head + 8, header + indices, 8], "energies, indices, norms");
    assert_eq!(seen("threshold(v=0.5)", None, &PARAMS).fixed[0], head + 8, "sizes");
}

#[test]
fn a_nan_on_one_rank_is_nan_on_all_and_leaves_the_state() {
    for (spec, leader) in EXCHANGES {
        let mut ranks = ranks(spec, 3);
        let plan = |gradients, index| Plan { leader: led(leader), ..Plan::new(index, gradients) };
        (0..4).for_each(|index| _ = step(&mut ranks, &plan(gradients(index, 3), index)));
        let before: Vec<_> = ranks.iter().map(Bucket::state).collect();
        for broken in 0..3 {
            let mut bad = gradients(4, 3);
            bad[broken][7] = f32::INFINITY;
            for (ran, out) in step(&mut ranks, &plan(bad, 4)).ends {
                assert_eq!(ran, Ok(Ran::Refused), "{spec}");
                assert!(out.iter().all(|v| v.is_nan()), "{spec}");
            }
            assert_eq!(ranks[broken].status(), Status::NotFinite, "{spec}: {}", ranks[broken].fault());
            assert_eq!(ranks.iter().map(Bucket::state).collect::<Vec<_>>(), before, "{spec}, rank {broken}");
        }
    }
}

/// Half of the largest number twice: in the second step what the first left behind makes it infinite.
#[test]
fn a_residual_that_overflows_is_told_from_a_gradient() {
    let mut ranks = ranks("topk(k=1)+ef(vanilla)", 2);
    let n = gradient(0, 0).len();
    let large = |index| Plan::new(index, vec![vec![2e38; n], vec![1.0; n]]);
    assert_eq!(step(&mut ranks, &large(0)).ends[0].0, Ok(Ran::Good));
    assert!(step(&mut ranks, &large(1)).ends.iter().all(|(ran, _)| *ran == Ok(Ran::Refused)));
    assert_eq!([ranks[0].status(), ranks[1].status()], [Status::Overflowed, Status::Ready]);
    assert!(ranks[0].fault().contains("the residual has overflowed, the gradient is finite"), "{}", ranks[0].fault());
}

#[test]
fn a_failed_rank_is_refused_by_all_and_leaves_the_residual() {
    for (spec, leader) in EXCHANGES {
        let mut ranks = ranks(spec, 2);
        let plan = |gradients| Plan { leader: led(leader), ..Plan::new(0, gradients) };
        for (whole, short) in
            [vec![gradient(0, 0), vec![0.0; 3]], vec![vec![0.0; 3], gradient(0, 0)]].into_iter().enumerate()
        {
            for (ran, _) in step(&mut ranks, &plan(short)).ends {
                assert_eq!(ran, Ok(Ran::Refused), "{spec}");
            }
            assert_eq!((ranks[whole].status(), ranks[whole].fault()), (Status::Ready, ""), "{spec}");
            assert!(ranks[1 - whole].status() == Status::Failed && !ranks[1 - whole].fault().is_empty(), "{spec}");
            assert!(ranks.iter().all(|rank| rank.residual().iter().all(|v| *v == 0.0)), "{spec}");
        }
    }
}

/// Whole numbers, so that sums are exact: whatever was compressed, by whatever in turns, nothing is lost.
#[test]
fn what_is_sent_and_the_residual_add_up_over_changes_of_strategy() {
    let mut own = ranks("topk(k=0.1)+ef(vanilla)", 2);
    let whole =
        |rank: u64, step: u64| -> Vec<f32> { gradient(step, rank).iter().map(|x| (50.0 * x).round()).collect() };
    let (mut given, mut sent) = (vec![0.0f32; N], vec![0.0f32; N]);
    let specs = [
        ("topk(k=0.1)+ef(vanilla)", None),
        ("lwtopk(k=0.05)+ef(vanilla)", None),
        ("mstopk(k=0.1)+ef(vanilla)", Some(Leader::Largest)),
        ("none", None),
        ("topk(k=0.02)+ef(vanilla)", Some(Leader::Rank(0))),
        ("randomk(k=0.2)+ef(vanilla)", None),
    ];
    for index in 0..24u64 {
        let (spec, leader) = specs[index as usize % specs.len()];
        own.iter_mut().for_each(|bucket| bucket.prepare(&spec.parse().unwrap(), None).unwrap());
        let gradients: Vec<_> = (0..2).map(|rank| whole(rank, index)).collect();
        gradients.iter().for_each(|one| given.iter_mut().zip(one).for_each(|(sum, g)| *sum += g));
        let seen = step(&mut own, &Plan { leader, ..Plan::new(index, gradients) });
        assert!(good(&seen), "{spec}");
        sent.iter_mut().zip(&seen.ends[0].1).for_each(|(sum, mean)| *sum += 2.0 * mean);
        if spec == "none" {
            assert_eq!(sent, given, "what was left over goes out densely");
            assert!(!own[0].has_residual());
        }
    }
    own.iter().for_each(|own| sent.iter_mut().zip(own.residual()).for_each(|(sum, residual)| *sum += residual));
    assert_eq!(sent, given);
}

/// One allreduce more or less on one rank, or one of another size, would end the job.
#[test]
fn whether_there_is_a_residual_is_the_same_on_a_rank_that_holds_only_zeros() {
    for (spec, leader, expected) in [
        ("topk(k=0.25)+ef(vanilla)", None, true),
        ("topk(k=0.25)+ef(vanilla)", Some(Leader::Rank(0)), true),
        ("signsgd", None, false),
        ("none", None, false),
    ] {
        let mut ranks = ranks(spec, 2);
        step(&mut ranks, &Plan { leader, ..Plan::new(0, vec![gradient(1, 0), vec![0.0; N]]) });
        ranks.iter_mut().for_each(|rank| rank.prepare(&"none".parse().unwrap(), None).unwrap());
        assert_eq!([ranks[0].has_residual(), ranks[1].has_residual()], [expected; 2], "{spec}");
    }
}

#[test]
fn an_exchange_that_was_left_in_the_midst_does_not_count() {
    for (spec, leader) in EXCHANGES {
        let (mut own, mut twin) = (ranks(spec, 1), ranks(spec, 1));
        let leader = led(leader.map(|rank| rank.map(|_| 0)));
        let plan = |index| Plan { leader, ..Plan::new(index, gradients(index, 1)) };
        for ranks in [&mut own, &mut twin] {
            step(ranks, &plan(0));
        }
        own[0].begin(&Host, &gradient(5, 5), plan(1).at, leader).unwrap();
        let [own, twin] = [&mut own, &mut twin].map(|ranks| (step(ranks, &plan(1)).ends, ranks[0].state()));
        assert_eq!(own, twin, "{spec}");
        // And finishing what was not begun is an error.
        let order = ranks(spec, 1)[0].finish(&Host, &Arrived::default(), &mut [0.0; N]).unwrap_err().to_string();
        assert!(order.contains("no exchange is under way"), "{order}");
    }
}

/// What an exception leaves behind counts neither for a trial, nor for a checkpoint, nor in another layout.
#[test]
fn what_was_left_in_the_midst_is_put_back_before_anything_else_looks() {
    let spec = "topk(k=0.1)+ef(vanilla)";
    let left = || {
        let mut store = Store::new(Member::alone(7));
        store.layout(0, PARAMS.to_vec()).unwrap();
        let bucket = store.bucket(0).unwrap();
        lock(&bucket).prepare(&spec.parse().unwrap(), None).unwrap();
        step(std::slice::from_mut(&mut *lock(&bucket)), &Plan::new(0, gradients(0, 1)));
        let residual = lock(&bucket).residual();
        lock(&bucket).begin(&Host, &gradient(5, 5), Plan::new(1, vec![]).at, None).unwrap();
        assert_ne!(lock(&bucket).residual(), residual);
        (store, residual)
    };
    let whole = |store: &Store| store.export().unwrap().into_values().flatten().collect::<Vec<f32>>();
    let (store, residual) = left();
    assert_eq!(whole(&store), residual);
    let (mut store, residual) = left();
    store.layout(0, PARAMS[..2].to_vec()).unwrap();
    assert_eq!(whole(&store), residual);
    let (store, residual) = left();
    lock(&store.bucket(0).unwrap()).in_trial(true).unwrap();
    lock(&store.bucket(0).unwrap()).end_candidate();
    assert_eq!(whole(&store), residual);
}

/// A rank in another step cannot read the leader's indices: it refuses in a sum that has one size on all ranks.
#[test]
fn under_star_a_rank_in_another_step_sums_as_many_elements() {
    let mut own = ranks("topk(k=0.1)+ef(vanilla)", 2);
    let begin = |(index, bucket): (u64, &mut Bucket)| {
        bucket.begin(&Host, &gradient(0, 0), Plan::new(index, vec![]).at, Some(Leader::Rank(0))).unwrap()
    };
    let rounds: Vec<_> = (0..).zip(&mut own).map(begin).collect();
    assert_eq!(rounds[0], rounds[1]);
    let mut message = vec![0; rounds[0].bytes];
    own[0].write(&mut message);
    let arrived = Arrived { refused: false, parts: vec![&message] };
    let next = own.iter_mut().map(|bucket| bucket.next(&Host, &arrived).unwrap()).collect::<Vec<_>>();
    assert_eq!(next[0], next[1]);
    assert_eq!((own[0].status(), own[1].status()), (Status::Ready, Status::Failed));
}

#[test]
fn under_var_the_largest_energy_leads_and_norms_are_told() {
    let mut ranks = ranks("topk(k=0.1)+ef(vanilla)", 3);
    let loud: Vec<Vec<f32>> =
        (0..3).map(|rank| gradient(0, rank).iter().map(|x| x * if rank == 2 { 10.0 } else { 1.0 }).collect()).collect();
    let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let norms: f64 = loud.iter().map(|values| norm(values)).sum();
    let seen = step(&mut ranks, &Plan { leader: Some(Leader::Largest), ..Plan::new(0, loud) });
    assert_eq!(seen.rounds.iter().map(|round| round.how).nth(1), Some(How::Broadcast(2)));
    for rank in &ranks {
        let (leader, [sum, _]) = rank.led().unwrap();
        assert!(leader == 2 && (f64::from(sum) / norms - 1.0).abs() < 1e-5, "{leader}, {sum} for {norms}");
    }
    step(&mut ranks, &Plan::new(1, gradients(1, 3)));
    assert_eq!(ranks[0].led(), None);
}

#[test]
fn saved_states_go_on_bit_for_bit_and_residuals_move_over() {
    let spec = "topk(k=0.1)+ef(vanilla)+nesterov(mu=0.9)";
    let mut own = ranks(spec, 1);
    (0..5).for_each(|index| _ = step(&mut own, &Plan::new(index, gradients(index, 1))));
    let state = own[0].state().unwrap();
    let mut again = vec![Bucket::new(0, PARAMS.to_vec(), Member::alone(7), None).unwrap()];
    again[0].prepare(&spec.parse().unwrap(), Some(&state)).unwrap();
    assert!(again[0].is_restored() && !own[0].is_restored());
    let [a, b] = [&mut again, &mut own].map(|ranks| step(ranks, &Plan::new(5, gradients(5, 1))).ends);
    assert_eq!(a, b);
    assert_eq!(again[0].state(), own[0].state());
    // A state of another compressor is left alone.
    let mut other = ranks("signsgd", 1);
    other[0].prepare(&"ssdm".parse().unwrap(), Some(&state)).unwrap();
    assert!(!other[0].is_restored() && other[0].spec().to_string() == "ssdm");

    let residual = own[0].residual();
    for spec in ["topk(k=0.1)+ef(vanilla)", "topk(k=0.1)+ef(dgc,mu=0.9)", "topk(k=0.1)"] {
        let mut moved = Bucket::new(0, PARAMS.to_vec(), Member::alone(7), Some(&residual)).unwrap();
        moved.prepare(&spec.parse().unwrap(), None).unwrap();
        assert_eq!(moved.residual(), residual, "{spec}");
    }
}

const MEMORIES: [&str; 5] = ["vanilla", "efsign", "efsign,gamma=0.5", "dgc,mu=0.9", "sgc,alpha=0.5,epsilon=0.5"];

/// After a step at `rate`, of a rank alone.
fn residual_after(own: &mut [Bucket], (index, rate): (u64, f64), gradient: Vec<f32>) -> Vec<f32> {
    assert!(good(&step(own, &Plan::new(index, vec![gradient]).rate(rate))));
    own[0].residual()
}

fn close(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && !a.is_empty() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0))
}

#[test]
fn a_first_rate_above_0_rescales_nothing_and_a_rate_of_0_keeps_the_last() {
    for memory in MEMORIES {
        let run = |rates: [f64; 4]| {
            let mut own = ranks(&format!("topk(k=0.1)+ef({memory})"), 1);
            let residual = |(index, rate)| residual_after(&mut own, (index, rate), gradient(index, 0));
            (0..).zip(rates).map(residual).collect::<Vec<_>>()
        };
        let constant = run([1e-5; 4]);
        for rates in [[0.0, 0.0, 1e-5, 1e-5], [0.0, f64::NAN, 1e-5, 0.0], [1e-5, 0.0, -1.0, 1e-5]] {
            let residual = run(rates);
            assert!(residual.iter().zip(&constant).all(|(a, b)| close(a, b)), "{memory} at {rates:?}");
        }
        let falls = run([1e-5, 0.0, 1e-6, 1e-6]);
        let rescales = !memory.starts_with("dgc") && !memory.starts_with("sgc") && !memory.contains("gamma");
        assert_eq!(!close(&falls[3], &constant[3]), rescales, "{memory}");
    }
}

/// Each layer's residual follows its own learning rate, whichever group's is the first.
#[test]
fn residuals_are_rescaled_by_the_rates_of_their_own_layers() {
    /// Sends nothing of these gradients.
    const KEEPS_ALL: &str = "threshold(v=1000000)+ef(vanilla)";
    let ratios = |rates: [[f64; 2]; 3]| {
        let mut own = ranks(KEEPS_ALL, 1);
        let gradient = gradient(0, 0);
        for (index, [first, other]) in (0..).zip(rates) {
            let plan = Plan::new(index, vec![gradient.clone()]).rate(first);
            step(&mut own, &Plan { rates: vec![first, first, other], ..plan });
        }
        let residual = own[0].residual();
        let ratio = |at: usize| (residual[at] / gradient[at] * 1e3).round() / 1e3;
        (ratio(0), ratio(N - 1))
    };
    assert_eq!(ratios([[0.1, 0.2]; 3]), (3.0, 3.0));
    assert_eq!(ratios([[0.1, 0.2], [0.1, 0.02], [0.1, 0.02]]), (3.0, 12.0));
    assert_eq!(ratios([[0.1, 0.2], [0.01, 0.2], [0.01, 0.2]]), (12.0, 3.0));
    assert_eq!(ratios([[0.1, 0.2], [0.05, 0.1], [0.05, 0.1]]), (4.0, 4.0));
    // A frozen group, and one that is warmed up later, are scaled by their own first and last rates above 0 alone.
    assert_eq!(ratios([[0.1, 0.2], [0.1, 0.0], [0.01, 0.0]]), (21.0, 3.0));
    assert_eq!(ratios([[0.1, 0.0], [0.1, 0.2], [0.1, 0.1]]), (3.0, 5.0));
    let two = ranks("topk(k=0.1)+ef(vanilla)", 1)[0].layer_rates(&[0.1; 2]).unwrap_err().to_string();
    assert!(two.contains("2 parameters") && two.contains("has 3"), "{two}");
}

#[test]
fn what_moves_over_or_was_saved_without_a_rate_is_not_rescaled_by_the_first() {
    for memory in MEMORIES {
        let spec = format!("topk(k=0.1)+ef({memory})");
        let values = gradient(9, 0);
        let run = |rate: f64| {
            let mut own = vec![Bucket::new(0, PARAMS.to_vec(), Member::alone(7), Some(&values)).unwrap()];
            own[0].prepare(&spec.parse().unwrap(), None).unwrap();
            residual_after(&mut own, (0, rate), gradient(1, 0))
        };
        assert!(close(&run(1e-5), &run(1.0)), "{memory}");
        let mut own = ranks(&spec, 1);
        residual_after(&mut own, (0, 0.0), gradient(0, 0));
        let mut again = vec![Bucket::new(0, PARAMS.to_vec(), Member::alone(7), None).unwrap()];
        again[0].prepare(&spec.parse().unwrap(), own[0].state().as_deref()).unwrap();
        assert!(again[0].is_restored());
        let wants = residual_after(&mut own, (1, 1.0), gradient(1, 0));
        assert!(close(&residual_after(&mut again, (1, 1e-5), gradient(1, 0)), &wants), "{memory}");
    }
}
