"""Graph hashes: what counts as equal, and what must not."""

from __future__ import annotations

from maxport.engine.graphhash import compare_graphs, hash_graph

WEIGHT = '%{w} = mo.constant.external [name = "{name}", device = "cpu"] : !mo.tensor<[4, 4], f32>\n'


def graph(*lines: str, inputs: str = "%arg0: !mo.tensor<[n, 4], f32>") -> str:
    return f"mo.graph @g({inputs}) {{\n" + "\n".join(lines) + "\n}\n"


MATMUL = "rmo.matmul({a}, {b}) : (!mo.tensor<[n, 4], f32>) -> !mo.tensor<[n, 4], f32>"


def model(
    first: str = "up", scale: str = "2.0", names: tuple[str, str, str] = ("0", "1", "2")
) -> str:
    a, b, c = names
    return graph(
        WEIGHT.format(w=a, name=first).strip(),
        f"%{b} = " + MATMUL.format(a="%arg0", b=f"%{a}") + ' loc("x.py":3:1)',
        f"%{c} = rmo.scale(%{b}) {{by = {scale}}} : (!mo.tensor<[n, 4], f32>)",
        f"mo.output %{c} : !mo.tensor<[n, 4], f32>",
    )


def test_names_and_locations_do_not_matter() -> None:
    assert compare_graphs(model(), model(names=("7", "8", "9"))).equal


def test_another_weight_or_constant_does() -> None:
    assert not compare_graphs(model(), model(first="down")).equal
    different = compare_graphs(model(), model(scale="2.5"))
    assert not different.equal
    assert any("rmo.scale" in op for op in different.only_first)


def test_operand_order_does() -> None:
    one = graph(
        "%0 = rmo.sub(%arg0, %arg1) : ()", "mo.output %0", inputs="%arg0: !mo.a, %arg1: !mo.b"
    )
    two = graph(
        "%0 = rmo.sub(%arg1, %arg0) : ()", "mo.output %0", inputs="%arg0: !mo.a, %arg1: !mo.b"
    )
    assert not compare_graphs(one, two).equal


def test_unread_ops_are_left_out_but_writes_are_not() -> None:
    plain = graph("%0 = rmo.relu(%arg0) : ()", "mo.output %0")
    unread = graph("%0 = rmo.relu(%arg0) : ()", "%1 = rmo.exp(%arg0) : ()", "mo.output %0")
    write = graph(
        "%0 = rmo.relu(%arg0) : ()", "%1 = mo.store(%arg0) : () -> !mo.chain", "mo.output %0"
    )
    assert compare_graphs(plain, unread).equal
    assert not compare_graphs(plain, write).equal


def test_adding_zero_and_whole_slices_are_the_value() -> None:
    zero = "%z = mo.constant <#M.dense_array<0.0e+00> : tensor<f32>>"
    zero = "%z = mo.constant <#M.dense_array<0.000000e+00> : tensor<f32>> : !mo.tensor<[], f32>"
    kind = "!mo.tensor<[n, 4], f32>"
    cut = (
        "%1 = rmo.slice(%arg0) [starts = #mosh<ape[0, {s}]> : !mosh.ape, stops = #mosh<ape[n, 4]>"
        " : !mosh.ape, steps = #mosh<ape[1, 1]> : !mosh.ape] : "
        f"({kind}) -> {kind}"
    )
    plain = graph("%0 = rmo.relu(%arg0) : ()", "mo.output %0")
    added = graph(zero, "%1 = rmo.add(%arg0, %z) : ()", "%0 = rmo.relu(%1) : ()", "mo.output %0")
    sliced = graph(cut.format(s=0), "%0 = rmo.relu(%1) : ()", "mo.output %0")
    shifted = graph(cut.format(s=1), "%0 = rmo.relu(%1) : ()", "mo.output %0")
    assert compare_graphs(plain, added).equal
    assert compare_graphs(plain, sliced).equal
    assert not compare_graphs(plain, shifted).equal


def test_values_of_unknown_origin_never_count_as_equal() -> None:
    text = graph("%0 = rmo.relu(%block7) : ()", "mo.output %0")
    assert hash_graph(text).unknown == {"%block7"}
    assert not compare_graphs(text, text).equal


def calling(body: str, first: str = "blocks.0.", second: str = "blocks.1.") -> str:
    """A graph that calls one subgraph twice, under two prefixes."""
    types = "(!mo.tensor<[n, 4], f32>) -> !mo.tensor<[n, 4], f32>"
    calls = graph(
        f'%0 = mo.call @block(%arg0) [prefix = "{first}"] : {types}',
        f'%1 = mo.call @block(%0) [prefix = "{second}"] : {types}',
        "mo.output %1 : !mo.tensor<[n, 4], f32>",
    )
    return calls + body


def block(inputs: str = "%arg0: !mo.tensor<[n, 4], f32>", op: str = "rmo.matmul") -> str:
    weight = (
        '%0 = mo.constant.external [name = "up", isPlaceholder = true] : !mo.tensor<[4, 4], f32>'
    )
    lines = (weight, f"%1 = {op}(%arg0, %0) : ()", "mo.output %1 : !mo.tensor<[n, 4], f32>")
    return f"mo.graph @block({inputs}) isSubgraph {{\n" + "\n".join(lines) + "\n}\n"


def test_a_subgraph_call_is_its_body_under_its_prefix() -> None:
    plain = graph(
        '%0 = mo.constant.external [name = "blocks.0.up", x = 1] : !mo.tensor<[4, 4], f32>',
        '%1 = mo.constant.external [name = "blocks.1.up", x = 1] : !mo.tensor<[4, 4], f32>',
        "%2 = rmo.matmul(%arg0, %0) : ()",
        "%3 = rmo.matmul(%2, %1) : ()",
        "mo.output %3 : !mo.tensor<[n, 4], f32>",
    )
    called = calling(block())
    assert compare_graphs(called, plain).equal
    assert set(hash_graph(called).weights) == {"blocks.0.up", "blocks.1.up"}
    assert not compare_graphs(called, calling(block(), second="blocks.0.")).equal
    assert not compare_graphs(called, calling(block(op="rmo.other"))).equal


def test_a_subgraph_that_is_missing_or_renames_dimensions_never_counts_as_equal() -> None:
    for text in (calling(""), calling(block("%arg0: !mo.tensor<[m, 4], f32>"))):
        assert hash_graph(text).unknown == {"@block"}
        assert not compare_graphs(text, text).equal


def test_shard_and_stack_over_one_device_is_a_stack() -> None:
    small, kind = "!mo.tensor<[2, 3], f32>", "!mo.tensor<[2, 2, 3], f32>"
    inputs = f"%arg0: {small}, %arg1: {small}"
    sharded = (
        '%0 = mo.custom [symbol = "mo.shard_and_stack", parameters = {axis = 0 : index}]'
        f"(%arg0, %arg1) : ({small}, {small}) -> {kind}"
    )

    def stacked(one: str, two: str) -> str:
        shape = "[newShape = #mosh<ape[1, 2, 3]> : !mosh.ape]"
        return graph(
            f"%0 = rmo.reshape({one}) {shape} : ({small}) -> !mo.tensor<[1, 2, 3], f32>",
            f"%1 = rmo.reshape({two}) {shape} : ({small}) -> !mo.tensor<[1, 2, 3], f32>",
            f"%2 = rmo.concat(%0, %1) [axis = 0 : index] : () -> {kind}",
            "mo.output %2",
            inputs=inputs,
        )

    first = graph(sharded, "mo.output %0", inputs=inputs)
    assert compare_graphs(first, stacked("%arg0", "%arg1")).equal
    assert not compare_graphs(first, stacked("%arg1", "%arg0")).equal
