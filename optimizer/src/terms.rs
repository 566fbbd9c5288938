//! Latency and bandwidth terms of a strategy's communication: the critical path of the very schedules that
//! workers run, over the links they really have.
//!
//! | strategy | phases |
//! |---|---|
//! | allreduces (dense-ring, dense-tree) | the schedule of [`collectives::allreduce`] over 4·n bytes, or what a codec's messages add up to |
//! | allgather | each rank's (index, value) pairs: recursive doubling in the lab where N is a power of two, else ring, as Gloo and NCCL do |
//! | AR-Topk (art-ring, art-tree) | VAR: allgather of 4 bytes; binomial broadcast of the indices from the selected rank; the allreduce of the values |
//!
//! Equal links, no shared NICs and N a power of two: the closed forms, of allgather and broadcast those of [`crate::cost`] and of an
//! allreduce what its schedule says, which are exact there. Otherwise the schedules are simulated. Of rings of more than
//! [`MAX_RING_RANKS`], and of more ranks than schedules are made for, the closed forms stand in: of a ring over the mean latency around it, which
//! is what each message meets in turn, of others over the slowest; over the slowest bandwidth, divided by how many ranks of a node send to
//! others at once.

use crate::cost::{self, Net};
use flexcomm_collectives::{self as collectives, Allreduce, GenerateError, Schedule};
use flexcomm_domain::{CodecBytes, Collective, Link, LinkMatrix, Pattern, Rank, Selection, Strategy};
use serde::{Deserialize, Serialize};
use std::cell::{OnceCell, RefCell};

/// Bytes of a dense gradient of `values` fp32 values.
pub fn dense_bytes(values: u64) -> f64 {
    4.0 * values as f64
}

/// What travels: the size of the gradient and the codec's message sizes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Values in the fused gradient.
    pub values: u64,
    /// The compressor's message sizes.
    pub codec: CodecBytes,
}

/// Seconds on the critical path, by cause. Their sum is t_sync where nothing is measured.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Terms {
    /// What remains when nothing weighs anything: the latencies.
    pub alpha_s: f64,
    /// What the bytes add.
    pub beta_s: f64,
}

impl Terms {
    /// Their sum in seconds.
    pub fn total(self) -> f64 {
        self.alpha_s + self.beta_s
    }

    /// The same bytes in so many collectives: each waits for the one before.
    fn in_rounds(self, rounds: u32) -> Terms {
        Terms { alpha_s: self.alpha_s * f64::from(rounds), ..self }
    }

    fn then(self, next: Terms) -> Terms {
        Terms { alpha_s: self.alpha_s + next.alpha_s, beta_s: self.beta_s + next.beta_s }
    }
}

/// Bytes of the squared norm that VAR exchanges to select a rank.
const VAR_BYTES: f64 = 4.0;

/// Most roots whose broadcast is simulated; with more ranks, evenly spread ones stand for all.
pub const MAX_ROOTS: usize = 8;

/// Most ranks of a ring that is simulated: it has 2N² messages, 33,000 at 128 ranks. Other schedules have at most N log N.
pub const MAX_RING_RANKS: usize = 128;

/// Terms of one step's communication under `strategy`. Zero with one rank. To evaluate many strategies over
/// the same links, build [`Paths`] once.
pub fn terms(strategy: &Strategy, load: &Load, links: &LinkMatrix) -> Terms {
    Paths::new(links).terms(strategy, load)
}

/// The schedules of every collective over one matrix of links, ready to be timed for any size of message.
#[derive(Debug, Clone)]
pub struct Paths<'a> {
    links: &'a LinkMatrix,
    ring: Model,
    tree: Model,
    allgather: Model,
    /// Whether what is gathered goes around a ring and not by doubling.
    gathers_by_ring: bool,
    /// From some roots.
    broadcasts: Vec<Model>,
    /// Broadcasts timed before: art-ring and art-tree send the same indices.
    known: RefCell<Vec<(f64, Terms)>>,
    /// The exchange of VAR's norms.
    norms: OnceCell<Terms>,
}

/// How a schedule is timed.
#[derive(Debug, Clone)]
enum Model {
    Closed(Net),
    /// The schedule, and the time it takes when nothing weighs anything.
    Simulated {
        schedule: Schedule,
        alpha_s: f64,
    },
}

/// The backend of the lab's workers.
pub const LAB_BACKEND: &str = "lab-tcp";

/// Most sizes of broadcasts that are remembered: more than a space has ratios.
const MAX_KNOWN: usize = 128;

impl<'a> Paths<'a> {
    /// Chooses a model of each schedule over these links, as the lab's workers run them.
    pub fn new(links: &'a LinkMatrix) -> Self {
        Self::of_backend(links, LAB_BACKEND)
    }

    /// As a job's backend runs them; without a name, as the lab's.
    pub fn of_backend(links: &'a LinkMatrix, backend: &str) -> Self {
        let n = links.ranks();
        let gathers_by_ring = !n.is_power_of_two() || !matches!(backend, "" | LAB_BACKEND);
        let equal = equal_links(links).filter(|_| !links.is_shared());
        if n.is_power_of_two()
            && let Some(link) = equal
        {
            let net = Net { alpha: link.alpha.get(), beta: link.bandwidth.beta(), n };
            return Self::with((links, gathers_by_ring), 1, |_, _| Model::Closed(net));
        }
        let bounds = Bounds::of(links);
        Self::with((links, gathers_by_ring), if equal.is_some() { 1 } else { MAX_ROOTS }, |kind, schedule| match kind {
            Kind::Ring if n > MAX_RING_RANKS => Model::Closed(bounds.net(kind)),
            _ => schedule(n as u32).map_or(Model::Closed(bounds.net(kind)), |schedule| simulated(schedule, links)),
        })
    }

    fn with(
        (links, gathers_by_ring): (&'a LinkMatrix, bool),
        roots: usize,
        model: impl Fn(Kind, &dyn Fn(u32) -> Made) -> Model,
    ) -> Self {
        let roots = roots.min(links.ranks()) as u32;
        let broadcast = |i: u32| model(Kind::Tree, &|n| collectives::binomial_broadcast(n, Rank(i * n / roots)));
        Self {
            links,
            ring: model(Kind::Ring, &collectives::ring_allreduce),
            tree: model(Kind::Tree, &collectives::tree_allreduce),
            allgather: match gathers_by_ring {
                true => model(Kind::Ring, &collectives::ring_allgather),
                false => model(Kind::Doubling, &collectives::doubling_allgather),
            },
            gathers_by_ring,
            broadcasts: (0..roots).map(broadcast).collect(),
            known: RefCell::default(),
            norms: OnceCell::new(),
        }
    }

    /// Terms of one step's communication under `strategy`.
    pub fn terms(&self, strategy: &Strategy, load: &Load) -> Terms {
        let (n, k) = (load.values, strategy.cr().keep(load.values as usize) as u64);
        let codec = if strategy.is_dense() { &CodecBytes::DENSE } else { &load.codec };
        let collective = strategy.collective();
        match collective.pattern() {
            Pattern::Allreduce => self.allreduce(collective, codec.pairs(n, k)).in_rounds(codec.rounds),
            Pattern::Allgather => self.allgather(codec.pairs(n, k)).in_rounds(codec.rounds),
            Pattern::ArTopk => {
                self.select(strategy, codec.indices(n, k)).then(self.allreduce(collective, codec.values(k)))
            }
        }
    }

    /// AR-Topk before its allreduce: VAR's norms, then the indices from the selected rank.
    fn select(&self, strategy: &Strategy, index_bytes: f64) -> Terms {
        let norms = match strategy.selection() {
            Some(Selection::Var) => *self.norms.get_or_init(|| self.allgather(VAR_BYTES)),
            _ => Terms::default(),
        };
        norms.then(self.broadcast(index_bytes))
    }

    /// `bytes` of every rank, added up as the collective does.
    pub fn allreduce(&self, collective: Collective, bytes: f64) -> Terms {
        let by = collectives::allreduce(collective);
        let is_ring = std::ptr::eq(by, collectives::allreduce(Collective::DenseRing));
        match if is_ring { &self.ring } else { &self.tree } {
            Model::Closed(net) => closed(*net, bytes, by),
            Model::Simulated { schedule, alpha_s } => {
                self.simulated(schedule, *alpha_s, bytes / f64::from(schedule.chunks))
            }
        }
    }

    /// Each rank's `bytes` to every rank.
    pub fn allgather(&self, bytes: f64) -> Terms {
        match &self.allgather {
            Model::Closed(net) if self.gathers_by_ring => {
                let hops = net.n as f64 - 1.0;
                Terms { alpha_s: hops * net.alpha, beta_s: hops * bytes * net.beta }
            }
            Model::Closed(net) => split(*net, bytes, cost::allgather),
            Model::Simulated { schedule, alpha_s } => self.simulated(schedule, *alpha_s, bytes),
        }
    }

    /// Binomial broadcast of the whole message: the mean over its roots, since the selected rank changes.
    pub fn broadcast(&self, bytes: f64) -> Terms {
        let known = self.known.borrow().iter().find(|k| k.0 == bytes).map(|k| k.1);
        known.unwrap_or_else(|| {
            let each = self.broadcasts.iter().map(|model| match model {
                Model::Closed(net) => split(*net, bytes, cost::broadcast),
                Model::Simulated { schedule, alpha_s } => self.simulated(schedule, *alpha_s, bytes),
            });
            let sum = each.fold(Terms::default(), Terms::then);
            let roots = self.broadcasts.len() as f64;
            let mean = Terms { alpha_s: sum.alpha_s / roots, beta_s: sum.beta_s / roots };
            let mut known = self.known.borrow_mut();
            if known.len() < MAX_KNOWN {
                known.push((bytes, mean));
            }
            mean
        })
    }

    fn simulated(&self, schedule: &Schedule, alpha_s: f64, chunk_bytes: f64) -> Terms {
        let total = time(schedule, self.links, chunk_bytes);
        // Not max(0.0, ..), which would hide a NaN.
        let beta_s = if total < alpha_s { 0.0 } else { total - alpha_s };
        Terms { alpha_s, beta_s }
    }
}

type Made = Result<Schedule, GenerateError>;

/// Which ranks of a schedule send at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Each to the next.
    Ring,
    /// In each round half of them or fewer, to ranks that are as far away.
    Tree,
    /// All, to ranks that are as far away.
    Doubling,
}

fn simulated(schedule: Schedule, links: &LinkMatrix) -> Model {
    let alpha_s = time(&schedule, links, 0.0);
    Model::Simulated { schedule, alpha_s }
}

/// What closed forms are over where links differ or NICs are shared.
struct Bounds {
    ranks: usize,
    /// The mean latency around the ring, and the slowest of all.
    alpha: [f64; 2],
    /// Of the slowest link.
    beta: f64,
    /// How many ranks of a node send to others at once: around the ring, and if all do.
    at_once: [u32; 2],
}

impl Bounds {
    fn of(links: &LinkMatrix) -> Self {
        let (ranks, worst) = (links.ranks(), links.worst());
        let next = |rank: usize| (rank + 1) % ranks;
        let at_once = |sends: &dyn Fn(usize) -> bool| {
            let mut senders = vec![0_u32; ranks];
            (0..ranks).filter(|rank| sends(*rank)).for_each(|rank| senders[links.node(rank)] += 1);
            senders.into_iter().fold(1, u32::max)
        };
        let around = (0..ranks).map(|rank| links.get(rank, next(rank)).alpha.get()).sum::<f64>();
        Self {
            ranks,
            alpha: [around / ranks as f64, worst.alpha.get()],
            beta: worst.bandwidth.beta(),
            at_once: [at_once(&|rank| links.node(rank) != links.node(next(rank))), at_once(&|_| true)],
        }
    }

    fn net(&self, kind: Kind) -> Net {
        let [around, all] = self.at_once;
        let (alpha, at_once) = match kind {
            Kind::Ring => (self.alpha[0], around),
            // Where ranks are in the order of nodes, a tree leaves a node at one rank, or at two where its root is not the first of a node.
            Kind::Tree if around == 1 => (self.alpha[1], all.min(2)),
            Kind::Tree | Kind::Doubling => (self.alpha[1], all),
        };
        Net { alpha, beta: f64::from(at_once) * self.beta, n: self.ranks }
    }
}

/// Of ranks that start together. NaN when the size of a chunk is not a number: the caller's range check names it.
fn time(schedule: &Schedule, links: &LinkMatrix, chunk_bytes: f64) -> f64 {
    match collectives::simulate_after(schedule, &|_| chunk_bytes, links, &vec![0.0; links.ranks()]) {
        Ok(finish) => finish.into_iter().fold(0.0, f64::max),
        Err(_) => f64::NAN,
    }
}

fn closed(net: Net, bytes: f64, by: &Allreduce) -> Terms {
    let ranks = net.n.max(1) as f64;
    Terms { alpha_s: (by.latencies)(ranks) * net.alpha, beta_s: (by.volume)(ranks) * bytes * net.beta }
}

fn split(net: Net, bytes: f64, form: fn(Net, f64) -> f64) -> Terms {
    let alpha_s = form(net, 0.0);
    Terms { alpha_s, beta_s: form(Net { alpha: 0.0, ..net }, bytes) }
}

/// The link that all pairs share, if they do.
fn equal_links(links: &LinkMatrix) -> Option<Link> {
    let first = links.between().next()?;
    links.between().all(|link| link == first).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::CompressionRatio;
    use proptest::prelude::{Just, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

    fn matrix(n: usize, links: &[(f64, f64)]) -> LinkMatrix {
        LinkMatrix::from_fn(n, |from, to| {
            let (alpha, bandwidth) = links[(from * n + to) % links.len()];
            Link::new(alpha, bandwidth).unwrap()
        })
        .unwrap()
    }

    fn strategies() -> Vec<Strategy> {
        [
            "none@1/dense-ring",
            "none@1/dense-tree",
            "topk@0.01/allgather",
            "topk@0.01/art-ring:star",
            "topk@0.01/art-tree:var",
        ]
        .map(|s| s.parse().unwrap())
        .to_vec()
    }

    #[test]
    fn one_rank_pays_nothing() {
        let links = matrix(1, &[(0.05, 1e6)]);
        let load = Load { values: 1_000_000, codec: CodecBytes::PAPER };
        for strategy in strategies() {
            assert_eq!(terms(&strategy, &load, &links), Terms::default(), "{strategy}");
        }
    }

    #[test]
    fn a_slow_edge_slows_what_uses_it() {
        let link = |a: f64, b: f64| Link::new(a, b).unwrap();
        let even = LinkMatrix::uniform(4, link(1e-3, 1e9)).unwrap();
        // 1 -> 2 is on the ring; the binomial trees rooted at 0 never use it.
        let slow =
            LinkMatrix::from_fn(4, |f, t| if (f, t) == (1, 2) { link(1e-3, 1e8) } else { link(1e-3, 1e9) }).unwrap();
        let (even, slow) = (Paths::new(&even), Paths::new(&slow));
        let ring = |paths: &Paths| paths.allreduce(Collective::DenseRing, 4e6).beta_s;
        let tree = |paths: &Paths| paths.allreduce(Collective::DenseTree, 4e6).total();
        let ratio = ring(&slow) / ring(&even);
        assert!(ratio > 8.0, "a ring is as slow as its slowest edge, here {ratio} times");
        assert!((tree(&slow) - tree(&even)).abs() < 1e-12);
        assert!(slow.broadcast(4e6).total() > even.broadcast(4e6).total(), "rooted at 1, the edge is used");
    }

    #[test]
    fn var_pays_for_its_norms() {
        let links = matrix(8, &[(1e-3, 1e9)]);
        let load = Load { values: 1_000_000, codec: CodecBytes::PAPER };
        let star = terms(&"topk@0.01/art-ring:star".parse().unwrap(), &load, &links);
        let var = terms(&"topk@0.01/art-ring:var".parse().unwrap(), &load, &links);
        assert!((var.alpha_s - star.alpha_s - 3e-3).abs() < 1e-12);
    }

    #[test]
    fn many_ranks_take_no_less_than_fewer() {
        let n = MAX_RING_RANKS;
        // With so many more ranks the ring goes over links of the same kind.
        let more = n + 3;
        let uneven = |n| matrix(n, &[(1e-3, 1e9), (2e-3, 5e8), (1e-3, 2e9)]);
        let (below, above) = (uneven(n), uneven(more));
        for collective in Collective::ALL {
            let total = |links| Paths::new(links).allreduce(*collective, 1e6).total();
            assert!(total(&above) >= total(&below), "{collective}");
        }
        let gathered = |links| Paths::of_backend(links, "gloo").allgather(1e3).total();
        assert!(gathered(&above) >= gathered(&below), "around a ring, simulated and by the closed form");
    }

    /// Two nodes of two ranks each: a ring in order of nodes leaves each node once, one in turns twice; of what is gathered by doubling
    /// both ranks of a node send to the other node at once.
    #[test]
    fn ranks_of_one_node_share_its_nic() {
        let apart = matrix(4, &[(1e-6, 1e9)]);
        let on = |nodes: [u32; 4]| {
            let link = |from: usize, to: usize| match nodes[from] == nodes[to] {
                true => Link::new(1e-6, 1e12).unwrap(),
                false => Link::new(1e-6, 1e9).unwrap(),
            };
            LinkMatrix::from_fn(4, link).unwrap().on_nodes(nodes.to_vec()).unwrap()
        };
        let (in_order, in_turns) = (on([0, 0, 1, 1]), on([0, 1, 0, 1]));
        let beta = |links: &LinkMatrix, f: &dyn Fn(&Paths) -> Terms| f(&Paths::new(links)).beta_s;
        let ring = |paths: &Paths| paths.allreduce(Collective::DenseRing, 4e6);
        let gather = |paths: &Paths| paths.allgather(1e6);
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 0.02;
        assert!(near(beta(&in_order, &ring), beta(&apart, &ring)));
        assert!(near(beta(&in_turns, &ring), 2.0 * beta(&apart, &ring)));
        let by_ring = |links: &LinkMatrix| Paths::of_backend(links, "gloo").allgather(1e6).beta_s;
        assert!(near(by_ring(&apart), 24e-3) && near(by_ring(&in_order), 24e-3), "{}", by_ring(&in_order));
        // Three messages of 8 ms by itself; 2 x 2 through the NIC here.
        assert!(near(beta(&apart, &gather), 24e-3), "{}", beta(&apart, &gather));
        assert!(near(beta(&in_order, &gather), 32e-3), "{}", beta(&in_order, &gather));
    }

    /// Where the closed forms begin, they are no jump: of 128 and of 256 ranks, 8 on each node.
    #[test]
    fn many_ranks_of_one_node_share_its_nic() {
        let times = |n: u32, nodes: &dyn Fn(u32) -> u32, f: &dyn Fn(&Paths) -> Terms| {
            let apart = matrix(n as usize, &[(1e-6, 1e9)]);
            let shared = apart.clone().on_nodes((0..n).map(nodes).collect()).unwrap().with_local_links();
            f(&Paths::new(&shared)).beta_s / f(&Paths::new(&apart)).beta_s
        };
        let ring = |paths: &Paths| paths.allreduce(Collective::DenseRing, 1e8);
        for n in [MAX_RING_RANKS as u32, 2 * MAX_RING_RANKS as u32] {
            let (in_order, in_turns) = (|r| r / 8, |r| r % (n / 8));
            let of = |f| times(n, &in_order, f);
            let (one, eight) = (of(&ring), times(n, &in_turns, &ring));
            assert!((0.9..1.1).contains(&one) && (7.0..8.1).contains(&eight), "{n}: {one} {eight}");
            // Of log N rounds those within a node are almost free.
            let (tree, broadcast) = (
                of(&|paths: &Paths| paths.allreduce(Collective::DenseTree, 1e8)),
                of(&|paths: &Paths| paths.broadcast(1e8)),
            );
            assert!((0.4..1.0).contains(&tree) && (0.4..1.4).contains(&broadcast), "{n}: {tree} {broadcast}");
            let gather = of(&|paths: &Paths| paths.allgather(1e6));
            assert!((6.0..8.1).contains(&gather), "{n}: {gather}");
        }
    }

    /// Of eight hops around the ring seven are within a node, above and below the limit of what is simulated.
    #[test]
    fn most_latencies_of_a_ring_are_within_nodes() {
        let alpha_s = |n: u32| {
            let links = matrix(n as usize, &[(1e-3, 25e9)]).on_nodes((0..n).map(|r| r / 8).collect()).unwrap();
            Paths::new(&links.with_local_links()).allreduce(Collective::DenseRing, 4e5).total()
        };
        let (below, above) = (alpha_s(120), alpha_s(136));
        assert!((1.0..1.3).contains(&(above / below)), "{below} {above}");
    }

    proptest! {
        #[test]
        fn simulated_schedules_agree_with_the_closed_forms(
            log in 0u32..6, alpha in 1e-6..0.2f64, bandwidth in 1e6..1e12f64, bytes in 0.0..1e9f64
        ) {
            let n = 1usize << log;
            let links = matrix(n, &[(alpha, bandwidth)]);
            let closed = Paths::new(&links);
            let simulated = Paths::with((&links, false), MAX_ROOTS, |_, schedule| {
                simulated(schedule(n as u32).unwrap(), &links)
            });
            prop_assert!(matches!(closed.allgather, Model::Closed(_)));
            let all = |p: &Paths| {
                let sums = Collective::ALL.iter().map(|collective| p.allreduce(*collective, bytes));
                sums.chain([p.allgather(bytes), p.broadcast(bytes)]).collect::<Vec<_>>()
            };
            for (c, s) in all(&closed).iter().zip(&all(&simulated)) {
                prop_assert!((c.alpha_s - s.alpha_s).abs() <= 1e-9 * c.alpha_s, "{c:?} {s:?}");
                prop_assert!((c.beta_s - s.beta_s).abs() <= 1e-9 * c.total(), "{c:?} {s:?}");
            }
        }

        #[test]
        fn unequal_links_stay_between_the_best_and_the_worst(
            n in 2usize..9,
            cells in prop::collection::vec((1e-5..0.1f64, 1e7..1e11f64), 1..80),
            values in 1u64..50_000_000,
            c in prop_oneof![Just(0.1), Just(0.011), Just(0.001)],
            var in any::<bool>(),
        ) {
            let links = matrix(n, &cells);
            let used: Vec<Link> = (0..n * n).filter(|i| i / n != i % n).map(|i| links.get(i / n, i % n)).collect();
            let best = Link::new(
                used.iter().map(|l| l.alpha.get()).fold(f64::MAX, f64::min),
                used.iter().map(|l| l.bandwidth.get()).fold(0.0, f64::max),
            ).unwrap();
            let (low, high) = (LinkMatrix::uniform(n, best).unwrap(), LinkMatrix::uniform(n, links.worst()).unwrap());
            let load = Load { values, codec: CodecBytes::PAPER };
            let cr = CompressionRatio::new(c).unwrap();
            for s in strategies() {
                let selection = s.selection().map(|_| if var { Selection::Var } else { Selection::Star });
                let spec = s.family().at(cr).unwrap();
                let s = Strategy::new(spec, s.collective(), selection).unwrap();
                let t = terms(&s, &load, &links).total();
                prop_assert!(t >= terms(&s, &load, &low).total() * (1.0 - 1e-9), "{s}");
                prop_assert!(t <= terms(&s, &load, &high).total() * (1.0 + 1e-9), "{s}");
            }
        }

        #[test]
        fn more_bytes_never_take_less_time(cells in prop::collection::vec((1e-5..0.1f64, 1e7..1e11f64), 1..40), bytes in 0.0..1e8f64) {
            let links = matrix(5, &cells);
            let paths = Paths::new(&links);
            for collective in Collective::ALL {
                let total = |bytes| paths.allreduce(*collective, bytes).total();
                prop_assert!(total(bytes) <= total(bytes * 1.5 + 1.0), "{collective}");
                prop_assert_eq!(paths.allreduce(*collective, 0.0).beta_s, 0.0);
            }
            prop_assert!(paths.allgather(bytes).total() <= paths.allgather(bytes * 1.5 + 1.0).total());
        }
    }
}
