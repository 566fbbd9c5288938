//! Buckets on a device and on the host side by side: the same parts of every round, the same means, the same residuals; ranks
//! change sides as they like.

use crate::ranks::{Emulated, Memory, Plan, Seen, bits, device, ranks, settle, source, step};
use flexcomm_compression::pipeline::Step;
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_exchange::{Answers, Bucket, HEAD_BYTES, How, Leader, Param, Ran, Store, lock};
use flexcomm_gpu_kernels::{Copies, DType, Device, LaunchError, Span};

const PARAMS: [Param; 3] =
    [Param { id: 0, len: 1201, cols: 1 }, Param { id: 1, len: 5, cols: 1 }, Param { id: 2, len: 1000, cols: 8 }];
const N: usize = 2206;
const ON: Option<DType> = Some(DType::F32);

fn all(spec: &str) -> Vec<Bucket> {
    ranks(spec, 3, &PARAMS)
}

fn gradient(step: u64, rank: u64) -> Vec<f32> {
    let wave = |i: u64| ((i * 37 + rank * 59 + step * 101) % 997) as f32 / 500.0 - 1.0;
    (0..N as u64).map(|i| wave(i) * wave(i / 3)).collect()
}

fn gradients(index: u64) -> Vec<Vec<f32>> {
    (0..3).map(|rank| gradient(index, rank)).collect()
}

/// Bits; of zeros any sign, since adding has one and writing the other.
fn unsigned(values: &[f32]) -> Vec<u32> {
    bits(values).into_iter().map(|bits| if bits << 1 == 0 { 0 } else { bits }).collect()
}

/// The residual, wherever it lies, without moving it for good.
fn residual_bits(bucket: &mut Bucket) -> Vec<u32> {
    let on_device = bucket.is_on_device();
    bucket.copy_to_host().unwrap();
    let residual = unsigned(&bucket.residual());
    if on_device {
        settle(bucket, 5);
    }
    residual
}

/// Every method, with a memory and without.
const SPECS: [&str; 32] = [
    "topk(k=0.05)+ef(vanilla)",
    "topk(k=40)",
    "lwtopk(k=0.05)+ef(vanilla)",
    "mstopk(k=0.05)+ef(vanilla)",
    "dgc(k=0.1)+ef(vanilla)",
    "sgc(k=0.1)",
    "threshold(v=0.6)+ef(vanilla)",
    "hardthreshold(tau=0.5)+ef(vanilla)",
    "randomk(k=0.05)+ef(vanilla)",
    "randomk(k=0.05,scaled=true)+seed(5)",
    "randomk(k=0.05,shared=false)+ef(vanilla)+scope(tensor)",
    "qsparse(k=0.05)+ef(vanilla)",
    "qsparse(k=0.05,select=random)",
    "threelc(s=1.5)+ef(vanilla)+scope(bucket)",
    "threelc(s=1)+ef(vanilla)",
    "signsgd",
    "efsignsgd+ef(vanilla)",
    "onebit(scaling=true)",
    "onebit",
    "ssdm",
    "qsgd(s=4)+ef(vanilla)",
    "qsgd(s=64)+ef(vanilla)",
    "qsgd(s=100,bucket=0,norm=max)",
    "dithering(k=4)+ef(vanilla)",
    "terngrad",
    "lpcsvrg(bits=4)",
    "onebitsgd(per=column)+ef(vanilla)",
    "minmax8",
    "inceptionn+ef(vanilla)",
    "natural",
    "eightbit+ef(vanilla)",
    "fp16+ef(vanilla)",
];

/// A step of ranks on both sides against the same on the host.
fn compare(mixed: &mut [Bucket], host: &mut [Bucket], plan: &Plan, label: &str) {
    let Seen { parts, rounds, ends: got, .. } = step(mixed, plan);
    let want = step(host, &Plan { sides: vec![None; 3], ..plan.clone() });
    let good = got[0].0 == Ok(Ran::Good);
    for (number, (round, (own, other))) in rounds.iter().zip(parts.iter().zip(&want.parts)).enumerate().filter(|_| good)
    {
        // AR-Topk's energies and norms are sums in another order.
        let same = |a: &Vec<u8>, b: &Vec<u8>| match (plan.leader.is_some(), round.how) {
            (false, _) | (true, How::Broadcast(_)) => a == b,
            (true, How::Sum(_)) => a[..a.len() - 8] == b[..b.len() - 8],
            (true, _) => a.len() == b.len(),
        };
        assert!(own.iter().zip(other).all(|(a, b)| same(a, b)), "{label}, round {number}: other messages");
    }
    for (rank, ((ran, mean), (wanted, out))) in got.iter().zip(&want.ends).enumerate() {
        assert_eq!(ran, wanted, "{label}, rank {rank}");
        assert!(!good || unsigned(mean) == unsigned(out), "{label}, rank {rank}: another mean");
    }
    for (rank, (a, b)) in mixed.iter_mut().zip(host).enumerate() {
        assert!(residual_bits(a) == residual_bits(b), "{label}, rank {rank}: another residual");
        let [a, b] = [a.energy(), b.energy()];
        assert!((a.gain() - b.gain()).abs() < 1e-6, "{label}: {a:?} {b:?}");
        assert!((a.compensated - b.compensated).abs() <= 1e-6 * b.compensated, "{label}: {a:?} {b:?}");
    }
}

/// Learning rates change, of three parameter groups, one of which follows the others at its own pace and one of which is frozen at
/// times; two gradients are not finite.
fn plan(index: u64) -> Plan {
    let rate = [0.1, 0.1, 0.05, 0.0, 0.1, 0.1][index as usize % 6];
    let mut gradients = gradients(index);
    if index == 3 {
        gradients[1][2000] = f32::NAN;
    }
    if index == 4 || index == 9 {
        gradients[0][3] = f32::INFINITY;
    }
    let frozen = if index.is_multiple_of(2) { 0.0 } else { rate };
    let sides = vec![None, ON, if index.is_multiple_of(2) { ON } else { None }];
    Plan { sides, rates: vec![rate, 0.1 * (1 + index % 3) as f64, frozen], ..Plan::new(index, gradients).rate(rate) }
}

#[test]
fn messages_means_and_residuals_are_those_of_the_host() {
    if Emulated::new(0).is_none() {
        return;
    }
    for spec in SPECS {
        let (mut mixed, mut host) = (all(spec), all(spec));
        for index in 0..6 {
            compare(&mut mixed, &mut host, &plan(index), &format!("{spec}, step {index}"));
        }
    }
}

/// Leaders and energies change hands, each rank works where it likes, gradients of the leader and of another rank are not finite.
#[test]
fn ar_topk_has_the_bits_of_the_host() {
    if Emulated::new(0).is_none() {
        return;
    }
    let spec = "topk(k=0.05)+ef(vanilla)";
    let (mut mixed, mut host) = (all(spec), all(spec));
    for index in 0..10u64 {
        let leader = if index % 2 == 0 { Leader::Largest } else { Leader::Rank(index as u32 % 3) };
        let plan = Plan { leader: Some(leader), ..plan(index) };
        compare(&mut mixed, &mut host, &plan, &format!("step {index}"));
    }
    let why = all("mstopk(k=0.1)+ef(vanilla)");
    let mut one = why.into_iter().next().unwrap();
    settle(&mut one, 1);
    let (_memory, given) = source(&gradient(0, 0), DType::F32);
    let at = Step { index: 0, learning_rate: 0.1 };
    let why = one.begin(&device(1), given, at, Some(Leader::Largest)).unwrap_err().to_string();
    assert!(why.contains("by top-k of one tensor alone"), "{why}");
}

/// A warm-up begins at a rate of 0: what is left of its steps counts as left at the first rate above 0, wherever the next step is done.
#[test]
fn a_residual_from_before_the_first_rate_is_the_same_on_either_side() {
    if Emulated::new(0).is_none() {
        return;
    }
    let spec = "topk(k=0.05)+ef(vanilla)";
    let (mut mixed, mut host) = (all(spec), all(spec));
    for (index, sides) in (0..).zip([vec![ON; 3], vec![None, ON, None], vec![ON; 3]]) {
        let rate = if index == 0 { 0.0 } else { 0.1 };
        let plan = Plan { sides, ..Plan::new(index, gradients(index)).rate(rate) };
        compare(&mut mixed, &mut host, &plan, &format!("step {index}"));
    }
}

/// The mean goes on from a bf16 gradient.
#[test]
fn halves_are_the_same_on_all_ranks() {
    if Emulated::new(0).is_none() {
        return;
    }
    let mut ranks = all("mstopk(k=0.05)+ef(vanilla)");
    for index in 0..4 {
        let sides = vec![Some(DType::Bf16), ON, None];
        let seen = step(&mut ranks, &Plan { sides, ..Plan::new(index, gradients(index)) });
        assert!(seen.ends.iter().all(|(ran, _)| *ran == Ok(Ran::Good)), "{:?}", seen.ends);
        assert!(seen.ends.iter().all(|(_, mean)| bits(mean) == bits(&seen.ends[0].1)), "step {index}");
    }
}

#[test]
fn what_has_no_kernels_says_so() {
    for spec in [
        "powersgd(rank=2)+ef(vanilla)",
        "topk(k=0.1)+ef(dgc,mu=0.9)",
        "topk(k=0.1)+ef(vanilla,beta=0.5)",
        "topk(k=0.1)+ef(vanilla)+nesterov(mu=0.9)",
        "topk(k=0.1)+nonfinite(skip)",
        "topk(k=0.1)+values(bf16)",
        "qsgd(s=4,coding=gamma)",
        "signum",
        "randomk(k=0.1)+scope(tensor)",
        "topk(k=0.1)+checksum(crc32c)",
    ] {
        let why = all(spec)[0].device_bytes().unwrap_err().to_string();
        assert!(why.contains("has no kernels yet") && why.contains(spec.split('(').next().unwrap()), "{why}");
    }
}

/// Given up between the halves, judged as foreign or refused, and a state for a checkpoint.
#[test]
fn a_message_that_is_never_judged_or_foreign_does_not_count() {
    if Emulated::new(0).is_none() {
        return;
    }
    let spec = "topk(k=0.05)+ef(vanilla)";
    let (mut ranks, mut host) = (all(spec), all(spec));
    let on = Plan { sides: vec![ON; 3], ..Plan::new(0, gradients(0)) };
    step(&mut ranks, &on);
    step(&mut host, &Plan::new(0, gradients(0)));
    let before = residual_bits(&mut host[0]);
    let (_memory, given) = source(&gradient(1, 0), DType::F32);
    let at = |index| Step { index, learning_rate: 0.1 };
    let one = &mut ranks[0];
    let begin = |one: &mut Bucket, index| {
        let round = one.begin(&device(4), given, at(index), None).unwrap();
        let block = Memory::of(&vec![0u8; HEAD_BYTES + round.bytes]);
        one.write_on(&device(5), &[0; HEAD_BYTES], block.span()).unwrap();
        block.bytes()[HEAD_BYTES..HEAD_BYTES + one.message_header_bytes()].to_vec()
    };
    // An exception came between the halves.
    begin(one, 1);
    assert_eq!(residual_bits(one), before);
    assert!(one.state() == host[0].state(), "the state of the host, to the bit");
    // A message of another k, as of a rank that runs something else; and a payload that could not be read.
    settle(one, 1);
    let fine = [0; 52];
    let mut header = begin(one, 1);
    header[32] ^= 1;
    let error = one.judge(Answers { refused: false, headers: &[&header], outcome: &fine }).unwrap_err().to_string();
    assert!(error.contains("rank 0") && error.contains("another strategy"), "{error}");
    assert_eq!(residual_bits(one), before);
    let header = begin(one, 1);
    let mut refused = fine;
    refused[48] = 2;
    let error = one.judge(Answers { refused: false, headers: &[&header], outcome: &refused }).unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("payload"), "{error}");
    assert_eq!(residual_bits(one), before);
    begin(one, 1);
    assert_eq!(one.judge(Answers { refused: true, headers: &[], outcome: &fine }).unwrap(), Ran::Refused);
    let again = one.judge(Answers { refused: false, headers: &[], outcome: &fine }).unwrap_err().to_string();
    assert!(again.contains("no message was made"), "{again}");
    assert_eq!(residual_bits(one), before);
    // A block without room, a gradient that is too short, no memory at all: the host does it.
    let round = one.begin(&device(4), given, at(1), None).unwrap();
    let small = Memory::of(&vec![0u8; round.bytes / 2]);
    one.write_on(&device(5), &[0; HEAD_BYTES], small.span()).unwrap_err();
    let short = flexcomm_gpu_kernels::bucket::Gradient { at: given.at.part(0, 64), ..given };
    let why = one.begin(&device(4), short, at(1), None).unwrap_err().to_string();
    assert!(why.contains("the gradient of"), "{why}");
    one.copy_to_host().unwrap();
    let absent = one.begin(&device(4), given, at(1), None).unwrap_err().to_string();
    assert!(absent.contains("no memory on the device"), "{absent}");
    assert_eq!(residual_bits(one), before);
}

/// Whatever the host does with a bucket (checkpoints, trials, new layouts, dense steps) begins with fetching.
#[test]
fn the_residual_is_copied_to_the_host_when_the_host_needs_it() {
    if Emulated::new(0).is_none() {
        return;
    }
    let mut store = Store::new(flexcomm_compression::pipeline::Member::alone(7));
    store.layout(0, PARAMS.to_vec()).unwrap();
    let spec: CompressorSpec = "topk(k=0.05)+ef(vanilla)".parse().unwrap();
    let compressed = |store: &Store, index: u64, trial: bool| {
        let bucket = store.bucket(0).unwrap();
        let mut own = lock(&bucket);
        own.in_trial(trial).unwrap();
        own.prepare(&spec, None).unwrap();
        let done = step(
            std::slice::from_mut(&mut *own),
            &Plan { sides: vec![ON], ..Plan::new(index, vec![gradient(index, 0)]) },
        );
        assert_eq!(done.ends[0].0, Ok(Ran::Good));
        assert!(own.is_on_device());
    };
    compressed(&store, 0, false);
    let residual = store.export().unwrap();
    assert!(!lock(&store.bucket(0).unwrap()).is_on_device());
    assert_eq!(residual.values().map(Vec::len).collect::<Vec<_>>(), [1201, 5, 1000]);
    assert!(residual.values().flatten().any(|value| *value != 0.0));
    compressed(&store, 1, false);
    let before = store.export().unwrap();
    store.save();
    compressed(&store, 2, true);
    store.restore().unwrap();
    assert_eq!(store.export().unwrap(), before);
    compressed(&store, 2, false);
    store.layout(0, vec![PARAMS[1], PARAMS[0], PARAMS[2]]).unwrap();
    let after = store.export().unwrap();
    assert_eq!(after.keys().collect::<Vec<_>>(), [&0, &1, &2]);
    assert_ne!(after, before, "a step more");
    store.layout(0, PARAMS.to_vec()).unwrap();
    compressed(&store, 3, false);
    let bucket = store.bucket(0).unwrap();
    let mut own = lock(&bucket);
    own.prepare(&CompressorSpec::NONE, None).unwrap();
    let dense = step(std::slice::from_mut(&mut *own), &Plan::new(4, vec![vec![0.0; N]]));
    assert!(dense.ends[0].1.iter().any(|value| *value != 0.0), "the residual goes out");
    assert!(!own.has_residual());
}

/// Nothing can be read from it.
struct Unreadable(Emulated);

impl Device for Unreadable {
    fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), LaunchError> {
        self.0.launch(kernel, blocks, arguments)
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        self.0.zero(span)
    }

    fn copy(&self, to: Span, from: Span) -> Result<(), LaunchError> {
        self.0.copy(to, from)
    }

    fn blocks(&self, kernel: &'static str) -> u32 {
        self.0.blocks(kernel)
    }
}

impl Copies for Unreadable {
    fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), LaunchError> {
        self.0.upload(to, bytes)
    }

    fn download(&self, _: Span, _: &mut [u8]) -> Result<(), LaunchError> {
        Err(LaunchError::Driver { kernel: "memcpy", code: "refused".into() })
    }
}

/// The host takes the step that failed on the device before residuals were rescaled there.
#[test]
fn rates_that_the_device_did_not_apply_are_applied_by_the_host() {
    if Emulated::new(0).is_none() {
        return;
    }
    let spec = "lwtopk(k=0.05)+ef(vanilla)";
    let (mut ranks, mut host) = (all(spec), all(spec));
    step(&mut ranks, &Plan { sides: vec![ON; 3], ..Plan::new(0, gradients(0)) });
    step(&mut host, &Plan::new(0, gradients(0)));
    let (_memory, given) = source(&gradient(0, 0), DType::F32);
    let rates = vec![0.1, 0.2, 0.1];
    ranks[0].layer_rates(&rates).unwrap();
    let at = Step { index: 1, learning_rate: 0.1 };
    ranks[0].begin(&Unreadable(device(4)), given, at, None).unwrap_err();
    let plan = Plan { rates, ..Plan::new(1, gradients(0)) };
    step(&mut ranks, &Plan { sides: vec![None, ON, ON], ..plan.clone() });
    step(&mut host, &plan);
    for (rank, (one, other)) in ranks.iter_mut().zip(&mut host).enumerate() {
        assert!(residual_bits(one) == residual_bits(other), "rank {rank}");
    }
}
