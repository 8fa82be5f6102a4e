// Vercel's AI SDK against a server, over each of the APIs that it speaks: node ai_client.cjs URL MODEL

const assert = require("node:assert/strict");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { embedMany, generateText, Output, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");

const [url, name] = process.argv.slice(2);
const keyed = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(keyed);
const models = {
  responses: openai(name),
  chat: openai.chat(name),
  compatible: createOpenAICompatible({
    name: "pagefleet", baseURL: keyed.baseURL, includeUsage: true, supportsStructuredOutputs: true,
  })(name),
  messages: createAnthropic(keyed)(name),
};
const asked = { temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const prompt = "What is the capital of France?";
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Paris"]) }),
  execute: async ({ city }) => `Sunny in ${city}.`,
});

async function text(model) {
  const whole = await generateText({ model, prompt, ...asked });
  assert.match(whole.text, /Paris/);
  assert.equal(whole.finishReason, "stop");
  const stream = streamText({ model, prompt, ...asked });
  let said = "";
  for await (const delta of stream.textStream) said += delta;
  assert.equal(said, whole.text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
}

async function tools(model) {
  const steps = await generateText({
    model,
    prompt: "What is the weather in Rome?",
    tools: { weather },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    stopWhen: stepCountIs(2),
    ...asked,
  });
  const [called, told] = steps.steps;
  assert.equal(called.finishReason, "tool-calls");
  assert.match(called.toolResults[0].output, /^Sunny in (Rome|Paris)\.$/);
  assert.ok(told.text.length > 0);
  const stream = streamText({
    model, prompt, tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(1), ...asked,
  });
  for (const call of await stream.toolCalls) assert.ok(["Rome", "Paris"].includes(call.input.city));
}

async function structured(model) {
  const schema = z.object({ country: z.enum(["France", "Spain"]) });
  const answer = await generateText({ model, prompt, output: Output.object({ schema }), ...asked });
  assert.ok(["France", "Spain"].includes(answer.output.country));
}

async function embeddings() {
  const values = ["a page", "a block", "a page"];
  const { embeddings } = await embedMany({ model: openai.embedding(name), values });
  assert.deepEqual(embeddings[0], embeddings[2]);
  assert.notDeepEqual(embeddings[0], embeddings[1]);
}

(async () => {
  for (const [api, model] of Object.entries(models)) {
    for (const check of [text, tools, structured]) {
      await check(model);
      console.log(`${check.name} of ${api} passed`);
    }
  }
  await embeddings();
  console.log("embeddings passed");
})();
