//! LWTopk (seed paper of flexible communication, 2-C; GRACE's per-layer top-k): exact top-k in each layer by itself, so that
//! no layer goes without.

use super::topk::TopK;
use crate::codec::{Scope, Travels};
use crate::strategy::{Class, Entry, Kind, Nature, Param};

pub(super) const ENTRY: Entry = Entry {
    name: "lwtopk",
    code: 67,
    class: Class::Sparsification,
    about: "the k largest values of each layer",
    source: "Tyagi and Swany 2023, \"Flexible communication for optimal distributed learning\", 2-C, LWTopk",
    params: &[Param::required("k", Kind::Kept, "how many values of each layer are kept")],
    travels: |_| Travels::Gathers,
    scope: Scope::Tensor,
    nature: |_| Nature::Contractive(|values, n| values.kept(0, n) as f64 / n.max(1) as f64),
    examples: &["k=0.01", "k=3"],
    build: |values, shape| Box::new(TopK::new(values.kept(0, shape.values()), shape)),
};
