// The openai package of npm against a server: node openai_client.cjs URL MODEL

const assert = require("node:assert/strict");
const { OpenAI, BadRequestError, NotFoundError } = require("openai");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const asked = { model, messages, temperature: 0, max_completion_tokens: 16 };
const capital = {
  type: "function",
  function: {
    name: "capital_of",
    parameters: {
      type: "object",
      properties: { country: { enum: ["France", "Spain"] } },
      required: ["country"],
      additionalProperties: false,
    },
  },
};

async function models() {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert.deepEqual(ids, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
}

async function chat() {
  const whole = await client.chat.completions.create(asked);
  assert.match(whole.choices[0].message.content, /Paris/);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);

  const stream = await client.chat.completions.create({
    ...asked, stream: true, stream_options: { include_usage: true },
  });
  let text = "", finish = null, usage = null;
  for await (const chunk of stream) {
    for (const choice of chunk.choices) {
      text += choice.delta.content ?? "";
      finish = choice.finish_reason ?? finish;
    }
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(finish, whole.choices[0].finish_reason);
  assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
}

async function helper() {
  const runner = client.chat.completions.stream({ ...asked, logprobs: true, top_logprobs: 2 });
  const final = await runner.finalChatCompletion();
  const [choice] = final.choices;
  const tokens = choice.logprobs.content.map((entry) => entry.token);
  assert.equal(tokens.slice(0, -1).join(""), choice.message.content);
  assert.equal(tokens.at(-1), "<|im_end|>");
}

async function completions() {
  const answer = await client.completions.create({
    model, prompt: ["1, 2, 3,", "a, b,"], n: 2, max_tokens: 4, seed: 7, logprobs: 1,
  });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
  for (const choice of answer.choices) {
    assert.equal(choice.logprobs.tokens.join(""), choice.text);
  }
}

async function structured() {
  const answer = await client.chat.completions.parse({
    ...asked,
    max_completion_tokens: 60,
    response_format: {
      type: "json_schema",
      json_schema: { name: "capital", strict: true, schema: capital.function.parameters },
    },
  });
  assert.ok(["France", "Spain"].includes(JSON.parse(answer.choices[0].message.content).country));
}

async function tools() {
  for (const tool_choice of ["required", { type: "function", function: { name: "capital_of" } }]) {
    const runner = client.chat.completions.stream({
      ...asked, max_completion_tokens: 80, tools: [capital], tool_choice,
    });
    const { message } = (await runner.finalChatCompletion()).choices[0];
    const [call] = message.tool_calls;
    assert.equal(call.function.name, "capital_of");
    assert.ok(["France", "Spain"].includes(JSON.parse(call.function.arguments).country));
    const answered = await client.chat.completions.create({
      ...asked,
      tools: [capital],
      messages: [
        ...messages, message, { role: "tool", tool_call_id: call.id, content: "Paris" },
      ],
    });
    assert.ok(answered.choices[0].message.content.length > 0);
  }
}

async function responses() {
  const { name, parameters } = capital.function;
  const asking = { model, input: messages, temperature: 0, max_output_tokens: 60 };
  const whole = await client.responses.create(asking);
  assert.match(whole.output_text, /Paris/);
  const stream = client.responses.stream(asking);
  let text = "";
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, whole.output_text);
  assert.equal((await stream.finalResponse()).output_text, text);

  const tools = [{ type: "function", name, parameters, strict: true }];
  const called = await client.responses.create({ ...asking, tools, tool_choice: "required" });
  const [call] = called.output;
  assert.ok(["France", "Spain"].includes(JSON.parse(call.arguments).country));
  const output = { type: "function_call_output", call_id: call.call_id, output: "Paris" };
  const answered = await client.responses.create({
    ...asking, input: [...messages, ...called.output, output],
  });
  assert.ok(answered.output_text.length > 0);
  await assert.rejects(client.responses.retrieve(called.id), NotFoundError);
}

async function embeddings() {
  const asking = { model, input: ["a page", "a page", "a block"], dimensions: 16 };
  const bytes = await client.embeddings.create(asking);
  const numbers = await client.embeddings.create({ ...asking, encoding_format: "float" });
  const [first, again, other] = bytes.data.map((each) => each.embedding);
  assert.deepEqual([first, again, other], numbers.data.map((each) => each.embedding));
  assert.equal(first.length, 16);
  assert.deepEqual(first, again);
  assert.notDeepEqual(first, other);
}

async function aborted() {
  const stream = await client.chat.completions.create({
    ...asked, max_completion_tokens: 2000, ignore_eos: true, stream: true,
  });
  for await (const chunk of stream) {
    if (chunk.choices[0].delta.content) stream.controller.abort();
  }
}

async function errors() {
  const wrong = [
    [{ temperature: 3 }, BadRequestError, "temperature"],
    [{ messages: [] }, BadRequestError, "messages"],
    [{ model: "gpt-0" }, NotFoundError, "model"],
  ];
  for (const [fields, kind, param] of wrong) {
    await assert.rejects(
      client.chat.completions.create({ ...asked, ...fields }),
      (error) => error instanceof kind && error.param === param,
    );
  }
}

(async () => {
  for (const check of [
    models, chat, helper, completions, structured, tools, responses, embeddings, aborted, errors,
  ]) {
    await check();
    console.log(`${check.name} passed`);
  }
})();
